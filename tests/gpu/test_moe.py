"""Stable LatentMoE on a GPU against float64: routing, experts, SiTU, 4-bit decode, the layer."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from kernel_checks import gradients, poison, relative_error
from openk3.config import preset
from openk3.model.moe import LatentMoE
from openk3.model.ports import Context
from openk3.ops import mx
from openk3.ops.moe import count_margins, expert_mlp, grouped, route, situ_glu
from openk3.ops.moe.row_plan import Shape
from openk3.parallel.moonep.tiled import halves

pytestmark = pytest.mark.gpu
BF16 = 6e-3  # a few roundings of 2^-9 in series
CHOICES = {
    "grouped_mm": {},
    "ours": {"fused_situ": True, "triton_rows": True, "triton_grads": True},
}
CHOICES["ours, tall"] = {**CHOICES["ours"], "shape": Shape((0.5, 0.7, 1.0))}


def normal(*shape, seed=0, dtype=torch.bfloat16, scale=1.0):
    rng = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=rng, device="cuda") * scale).to(dtype)


def experts(num, latent, inner, magnitude, seed=0):
    """w13, w2 whose pre-activations have about this magnitude."""
    w13 = normal(num, 2 * inner, latent, seed=seed, scale=magnitude / latent**0.5)
    return w13, normal(num, latent, inner, seed=seed + 1, scale=inner**-0.5)


def spread(counts):
    """ids [T, 1] with counts[e] tokens of expert e, shuffled."""
    flat = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(5))
    return flat[order].view(-1, 1).cuda()


def chosen(tokens, top_k, num_experts, seed=1):
    rng = torch.Generator("cuda").manual_seed(seed)
    return torch.rand(tokens, num_experts, generator=rng, device="cuda").topk(top_k).indices


def run_experts(ids, options=None):
    def run(x, weights, w13, w2):
        inner = w13.shape[1] // 2
        w1, w3 = w13[:, :inner], w13[:, inner:]
        if options is None:
            return expert_mlp(x, ids, weights, w1, w3, w2, backend="reference")
        from openk3.ops.moe.routed import Choice, routed_experts

        return routed_experts(x, ids, weights, w1, w3, w2, choice=Choice(**options))

    return run


def check_experts(ids, num_experts, options, magnitude=8.0, latent=256, inner=192):
    w13, w2 = experts(num_experts, latent, inner, magnitude)
    x, d_out = normal(ids.shape[0], latent, seed=3), normal(ids.shape[0], latent, seed=4)
    weights = normal(*ids.shape, seed=5, dtype=torch.float32).abs() + 0.1
    inputs = [x, weights, w13, w2]
    wanted = gradients(run_experts(ids), [t.double() for t in inputs], d_out)
    plain = gradients(run_experts(ids), inputs, d_out)
    poison("cuda")
    got = gradients(run_experts(ids, options), inputs, d_out)
    poison("cuda")
    again = gradients(run_experts(ids, options), inputs, d_out)
    for name, a, b, c, exact in zip(
        ("out", "x", "weights", "w13", "w2"), got, again, plain, wanted, strict=True
    ):
        # rounding a pre-activation of 50 to 2^-3 is no fault of a kernel: plain torch sets the bar
        limit = max(BF16, 1.5 * relative_error(c, exact))
        assert relative_error(a, exact) < limit, name
        assert torch.equal(a, b), f"{name} differs between two runs"
    return got


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("counts", [[5, 0, 7, 16], [0, 300, 0, 0], [1, 0, 0, 0], [130, 64, 65, 1]])
def test_experts_with_uneven_counts(choice, counts):
    *_, d_w13, d_w2 = check_experts(spread(counts), 4, CHOICES[choice])
    for expert, count in enumerate(counts):
        if count == 0:
            assert not d_w13[expert].any()
            assert not d_w2[expert].any()


@pytest.mark.parametrize("choice", ["ours", "ours, tall"])
def test_more_tiles_than_the_chip_runs_at_once(choice):
    """Tiles of all heights, handed out as programs ask for them: the same bits every time."""
    counts = [1170, 0, 640, 1, 449, 2000, 65, 193]
    check_experts(spread(counts), len(counts), CHOICES[choice], latent=1024, inner=1088)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("magnitude", [1.0, 50.0])
def test_experts_at_all_magnitudes(choice, magnitude):
    check_experts(chosen(200, 4, 13), 13, CHOICES[choice], magnitude)


def test_experts_at_full_width():
    ids = chosen(64, 4, 8)
    w13, w2 = experts(8, 3584, 3072, 4.0)
    x, weights = normal(64, 3584, seed=3), torch.full((64, 4), 0.25, device="cuda")
    wanted = gradients(run_experts(ids), [t.double() for t in (x, weights, w13, w2)], x)
    for options in CHOICES.values():
        got = gradients(run_experts(ids, options), (x, weights, w13, w2), x)
        assert max(relative_error(a, b) for a, b in zip(got, wanted, strict=True)) < 1.5e-2


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, BF16), (torch.float32, 3e-6)])
def test_portable_products(dtype, error):
    """Of float32 the tensor cores take three parts; its tiles fit into shared memory too."""
    latent, inner = 320, 192
    sizes, owner = torch.tensor([128, 0, 64, 448, 0, 0, 0, 0]).cuda(), [0] * 128 + [2] * 64
    owner = torch.tensor(owner + [3] * 448).cuda()
    plan = halves(sizes, len(owner)).own
    x, d = (normal(len(owner), w, seed=w, dtype=dtype) for w in (latent, inner))
    w1, w3 = (normal(4, inner, latent, seed=s, dtype=dtype, scale=latent**-0.5) for s in (1, 2))
    gate, up = (torch.einsum("rl,rfl->rf", x.double(), w.double()[owner]) for w in (w1, w3))
    assert relative_error(grouped.rows_product(x, w1, plan, transposed=True), gate) < error
    back = torch.einsum("rf,rfl->rl", d.double(), w1.double()[owner])
    assert relative_error(grouped.rows_product(d, w1, plan, transposed=False), back) < error
    act, _ = grouped.situ_product(x, w1, w3, plan, 4.0, 25.0, save=False)
    assert relative_error(act, situ_glu(gate, up, 4.0, 25.0)) < error
    one_hot = torch.nn.functional.one_hot(owner, 4).double()
    grad = torch.einsum("re,rf,rl->efl", one_hot, d.double(), x.double())
    assert relative_error(grouped.weight_grad(d, x, plan), grad) < error


@pytest.mark.parametrize("tokens", [1, 63, 1000])
def test_router_and_histogram(tokens):
    from openk3.ops.moe.entrance import latent_route

    x, router, down = normal(tokens, 512), normal(112, 512, seed=1), normal(256, 512, seed=2)
    router = router * 512**-0.5
    bias = normal(112, seed=3, dtype=torch.float32, scale=0.2)
    valid = torch.arange(tokens, device="cuda") % 5 != 1
    counts = torch.zeros(112, 1000, dtype=torch.int32, device="cuda")
    got = latent_route(x, router, down, bias, 16, 2.5, counts=counts, valid=valid)
    wanted = route(x.double(), router.double(), bias.double(), 16, 2.5, backend="reference")
    assert torch.equal(got.ids, wanted.ids)
    assert relative_error(got.weights, wanted.weights) < 1e-5
    assert relative_error(got.cutoff, wanted.cutoff) < 1e-5
    assert relative_error(got.latent, x.double() @ down.double().T) < BF16
    exact = count_margins(wanted.scores, wanted.cutoff, bias, valid)
    assert int(counts.sum()) == 112 * int(valid.sum())
    # a sigmoid that differs in the last bit may move one margin across an edge
    assert int((counts.cumsum(1) - exact.cumsum(1)).abs().max()) <= 2


def test_router_gradients():
    x, router = normal(300, 512), normal(112, 512, seed=1) * 512**-0.5
    bias = torch.zeros(112, device="cuda")
    d_weights = normal(300, 16, seed=4, dtype=torch.float32)

    def run(backend):
        return lambda x, w: route(x, w, bias.to(x.dtype), 16, backend=backend).weights

    wanted = gradients(run("reference"), (x.double(), router.double()), d_weights)
    got = gradients(run("triton"), (x, router), d_weights)
    assert max(relative_error(a, b) for a, b in zip(got, wanted, strict=True)) < BF16


def test_equal_scores_take_the_lowest_ids():
    x = normal(77, 512)
    out = route(x, torch.zeros_like(normal(112, 512)), torch.zeros(112, device="cuda"), 16)
    assert (out.ids == torch.arange(16, device="cuda")).all()
    assert torch.equal(out.weights, torch.full_like(out.weights, 1 / 16))


@pytest.mark.parametrize("magnitude", [1.0, 50.0])
def test_situ(magnitude):
    gate, up = normal(333, 3072, scale=magnitude), normal(333, 3072, seed=1, scale=magnitude)
    d_out = normal(333, 3072, seed=2)
    exact = gradients(situ_glu, (gate.double(), up.double()), d_out)
    poison("cuda")
    got = gradients(lambda g, u: situ_glu(g, u, backend="triton"), (gate, up), d_out)
    assert max(relative_error(a, b) for a, b in zip(got, exact, strict=True)) < BF16


def packed_experts(num_experts=12, latent=256, inner=384):
    from openk3.ops.moe.mxfp4_layout import pack_experts

    stacks, exact = [], []
    for i, (n, k) in enumerate(((inner, latent), (inner, latent), (latent, inner))):
        data, scale = mx.quantize(normal(num_experts, n, k, seed=i, dtype=torch.float32) / k**0.5)
        stacks.append((data, scale))
        exact.append(mx.dequantize(data, scale).double())
    return pack_experts(*stacks), exact


@pytest.mark.parametrize("activations", ["bf16", "mxfp8"])
@pytest.mark.parametrize("tokens", [1, 2, 8, 17, 64])
def test_four_bit_experts(tokens, activations):
    from openk3.ops.moe.mxfp4 import mxfp4_expert_mlp

    packed, (w1, w3, w2) = packed_experts()
    x, ids = normal(tokens, 256, scale=3), chosen(tokens, 4, 12)
    weights = torch.rand(tokens, 4, device="cuda")
    poison("cuda")
    got = mxfp4_expert_mlp(x, ids, weights, packed, activations=activations)
    inputs = mx.fake_quantize(x.float(), "mxfp8") if activations == "mxfp8" else x
    act = situ_glu(
        torch.einsum("tkfl,tl->tkf", w1[ids], inputs.double()),
        torch.einsum("tkfl,tl->tkf", w3[ids], inputs.double()),
    )
    if activations == "mxfp8":
        act = mx.fake_quantize(act.float(), "mxfp8").double()
    wanted = torch.einsum("tklf,tkf,tk->tl", w2[ids], act, weights.double())
    assert relative_error(got, wanted) < (BF16 if activations == "bf16" else 2e-2)


@pytest.mark.parametrize("tokens", [5, 2100])
def test_packed_experts_of_a_model(tokens):
    """Few tokens stream packed bytes, many take dequantised experts; saving sees neither."""
    from dataclasses import replace

    from openk3.checkpoint.experts import PackedExperts

    config = replace(
        preset("nano"), num_experts=12, num_experts_per_token=4, routed_expert_hidden_size=256,
        moe_intermediate_size=384,
    )  # fmt: skip
    shapes = {"w1": (384, 256), "w3": (384, 256), "w2": (256, 384)}
    stacks = {
        name: mx.quantize(normal(12, n, k, seed=i, dtype=torch.float32) / k**0.5)
        for i, (name, (n, k)) in enumerate(shapes.items())
    }
    experts_ = PackedExperts(config, stacks).cuda()
    before = {name: t.clone() for name, t in experts_.state_dict().items()}
    dense = [mx.dequantize(*stacks[name]).double() for name in shapes]
    x, ids = normal(tokens, 256, scale=2), chosen(tokens, 4, 12)
    weights = torch.rand(tokens, 4, device="cuda")
    wanted = expert_mlp(x.double(), ids, weights.double(), *dense, backend="reference")
    with torch.no_grad():
        assert relative_error(experts_.routed(x, ids, weights), wanted) < BF16
    assert experts_.arranged
    assert all(torch.equal(t, before[name]) for name, t in experts_.state_dict().items())


def layer(seed=0):
    from dataclasses import replace

    config = replace(
        preset("micro"), hidden_size=512, routed_expert_hidden_size=256, moe_intermediate_size=192,
        num_experts=32, num_experts_per_token=4,
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device("cuda"):
        module = LatentMoE(config, 1)
    for p in module.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return module.bfloat16().train()


def restore_float32(module):
    module.gate.e_score_correction_bias = module.gate.e_score_correction_bias.float()
    return module


def test_a_layer_never_waits_for_the_device():
    module = restore_float32(layer())
    x = normal(2, 100, 512).requires_grad_()
    module(x, Context()).sum().backward()  # compile
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        valid = torch.ones(2, 100, dtype=torch.bool, device="cuda")
        out = module(x, Context(valid=valid))
        out.backward(x.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_recomputation_repeats_the_routing_and_counts_once():
    module = restore_float32(layer())
    x = normal(2, 333, 512)
    seen = []
    module.dispatcher = Recorder(module.dispatcher, seen)

    def step(run):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        out.backward(x)
        counts, load = module.gate.margin_counts.clone(), module.gate.load.clone()
        module.gate.margin_counts.zero_(), module.gate.load.zero_()
        return [out, leaf.grad, *[p.grad for p in module.parameters()], counts, load]

    plain = step(lambda leaf: module(leaf, Context()))
    again = step(lambda leaf: checkpoint(module, leaf, Context(), use_reentrant=False))
    assert len(seen) == 3
    assert all(torch.equal(ids, seen[0]) for ids in seen)
    assert int(plain[-1].sum()) == 666 * 4
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


class Recorder:
    """Notes the ids that pass."""

    def __init__(self, inner, seen):
        self.inner, self.seen = inner, seen

    def __call__(self, x, ids, weights, experts):
        self.seen.append(ids.clone())
        return self.inner(x, ids, weights, experts)


def test_layer_against_float64():
    module = restore_float32(layer(1))
    exact = restore_float32(layer(1)).double()
    exact.load_state_dict({n: t.double() for n, t in module.state_dict().items()})
    x = normal(2, 150, 512)
    results = []
    for m, leaf in ((module, x.clone()), (exact, x.double())):
        leaf.requires_grad_()
        out = m(leaf, Context())
        out.backward(x.to(out.dtype))
        results.append([out, leaf.grad, *[p.grad for p in m.parameters()]])
    names = ["out", "x", *[n for n, _ in module.named_parameters()]]
    errors = {n: relative_error(a, b) for n, a, b in zip(names, *results, strict=True)}
    assert {n: e for n, e in errors.items() if not e < 2e-2} == {}
