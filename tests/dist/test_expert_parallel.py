"""Experts spread over ranks: outputs and every gradient equal those of one device."""

import pytest
import torch
from dist_workers import best_device, crew
from kernel_checks import poison, relative_error
from moe_cases import LATENT, Toy, draw_tokens, one_device, probe
from torch.utils.checkpoint import checkpoint

from openk3.config import preset
from openk3.model import K3
from openk3.parallel.alltoall import AllToAllDispatcher
from openk3.parallel.experts import keep_block, spread_experts
from openk3.parallel.moonep import MoonEPDispatcher
from openk3.parallel.moonep.collectives import Collectives
from openk3.parallel.moonep.dispatch import allocate
from openk3.parallel.moonep.token_map import lay_out, map_tokens

pytestmark = pytest.mark.dist
KINDS = {"plain": AllToAllDispatcher, "balanced": MoonEPDispatcher}
CASES = {
    "random": [(13, None), (13, None), (13, None), (13, None)],
    "all to one expert's rank": [(9, [0, 1]), (9, [0, 1]), (9, [0, 1]), (9, [0, 1])],
    "nothing for rank 0": [(11, [2, 3, 4, 5, 6, 7]), (7, [3, 7]), (5, [2, 3]), (11, [6, 7])],
    "a rank without tokens": [(6, None), (0, None), (9, [4, 5, 7]), (3, None)],
    "no tokens at all": [(0, None), (0, None), (0, None), (0, None)],
}


def tokens_of(case, rank, padding=0.0, latent=LATENT, **_):
    num_tokens, favourites = CASES[case][rank]
    return draw_tokens(num_tokens, 8, 2, 7 + rank, favourites, padding, latent)


def three_steps(group, kind, case, padding=0.0, widths=None, device="cpu", dtype=torch.float32):
    """Forward and backward three times over poisoned memory; gradients must not change."""
    dispatcher, widths = KINDS[kind](group, 8), widths or {}
    x, ids, logits = tokens_of(case, group.rank(), padding, **widths)
    results = []
    for _ in range(3):
        poison(device, 1)
        experts = Toy(8, dtype=dtype, **widths).to(device)
        experts = keep_block(experts, group.rank(), group.size())
        leaf = x.to(device, dtype, copy=True).requires_grad_()
        scores = logits.to(device, copy=True).requires_grad_()
        out = dispatcher(leaf, ids.to(device), scores.softmax(-1), experts)
        (out * probe(group.rank(), *x.shape).to(device)).sum().backward()
        grads = [w.grad for w in (experts.w1, experts.w3, experts.w2)]
        results.append([t.cpu() for t in (out.detach(), leaf.grad, scores.grad, *grads)])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))
    return results[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_all_gradients_are_those_of_one_device(ranks, kind, size, case):
    check(ranks(size, three_steps, kind, case), size, case)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_goes_nowhere(ranks, kind):
    check(ranks(4, three_steps, kind, "random", 0.4), 4, "random", 0.4)


def check(found, size, case, padding=0.0):
    parts = [tokens_of(case, rank, padding) for rank in range(size)]
    per_rank, weight_grads = one_device(parts, 8)
    for rank in range(size):
        for got, wanted in zip(found[rank][:3], per_rank[rank], strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
        block = slice(rank * 8 // size, (rank + 1) * 8 // size)
        for got, wanted in zip(found[rank][3:], weight_grads, strict=True):
            torch.testing.assert_close(got.double(), wanted[block], rtol=1e-5, atol=1e-5)
    if any(len(x) for x, _, _ in parts):
        assert any(rank[2].abs().max() > 1e-3 for rank in found if rank[2].numel())


def on_gpus(world, kind, case, padding, dtype):
    widths = {"latent": 64, "inner": 64}
    group = torch.distributed.group.WORLD
    return three_steps(group, kind, case, padding, widths, world.device, dtype)


@pytest.mark.skipif(best_device(2) == "cpu", reason="needs two CUDA devices")
@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("padding", [0.0, 0.4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_two_gpus_compute_as_one_device(kind, case, padding, dtype, error):
    found = crew(2, "cuda").run(on_gpus, kind, case, padding, dtype)
    parts = [tokens_of(case, rank, padding, 64) for rank in range(2)]
    per_rank, weight_grads = one_device(parts, 8, latent=64, inner=64)
    for rank in range(2):
        blocks = [grad[4 * rank : 4 * rank + 4] for grad in weight_grads]
        for got, wanted in zip(found[rank], [*per_rank[rank], *blocks], strict=True):
            assert got.isfinite().all()
            assert (got.double() - wanted).norm() <= error * wanted.norm()


def tiled(group, parts, width):
    """One step with the products of a GPU, whose kernels run in the interpreter."""
    import triton_interpreter  # noqa: F401

    dispatcher = MoonEPDispatcher(None, 4, Collectives(group, align=64))
    experts = keep_block(Toy(4, latent=width, inner=width), group.rank(), group.size())
    x, ids, logits = parts[group.rank()]
    leaf, scores = x.requires_grad_(), logits.requires_grad_()
    out = dispatcher(leaf, ids, scores.softmax(-1), experts)
    (out * probe(group.rank(), len(x), width)).sum().backward()
    grads = [w.grad for w in (experts.w1, experts.w3, experts.w2)]
    return [out.detach(), leaf.grad, scores.grad, *grads]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's kernels are compiled, and run above")
@pytest.mark.parametrize("width", [64, 16])
@pytest.mark.parametrize("favourites", [[0, 1], [0, 1, 2, 3]])
def test_tiled_products_between_collectives(ranks, favourites, width):
    pytest.importorskip("triton")
    parts = [draw_tokens(n, 4, 2, n, favourites, latent=width) for n in (5, 0)]
    found = ranks(2, tiled, parts, width)
    per_rank, weight_grads = one_device(parts, 4, latent=width, inner=width)
    for rank in range(2):
        blocks = [grad[2 * rank : 2 * rank + 2] for grad in weight_grads]
        for got, wanted in zip(found[rank], [*per_rank[rank], *blocks], strict=True):
            assert relative_error(got, wanted) < 1e-5


def kept(group):
    """Shapes that autograd keeps of a layer."""
    dispatcher = MoonEPDispatcher(group, 8)
    experts = keep_block(Toy(8), group.rank(), group.size())
    x, ids, logits = tokens_of("nothing for rank 0", group.rank())
    shapes = []

    def note(tensor):
        shapes.append(list(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        dispatcher(x.requires_grad_(), ids, logits.softmax(-1), experts)
    return shapes, [list(t.shape) for t in (x, experts.w1, experts.w3, experts.w2)]


def test_nothing_but_the_dispatch_input_is_kept(ranks):
    for found, wanted in ranks(4, kept):
        assert found == wanted


def two_layers(group, kind, steps=2):
    """Two layers share a dispatcher; the second's forward runs before the first's backward."""
    dispatcher = KINDS[kind](group, 8)
    layers = [keep_block(Toy(8, seed), group.rank(), group.size()) for seed in (0, 1)]
    for step in range(steps):
        outs = []
        for seed, experts in enumerate(layers):
            x, ids, logits = draw_tokens(9, 8, 2, 50 + 10 * step + 5 * seed + group.rank(), [0, 1, 4])
            out = dispatcher(x, ids, logits.softmax(-1), experts)
            outs.append((out * probe(group.rank(), 9)).sum())
        for loss in outs:
            loss.backward()
    return [w.grad for experts in layers for w in (experts.w1, experts.w3, experts.w2)]


def test_layers_take_turns_in_the_slots_and_micro_batches_add_up(ranks):
    plain, balanced = (ranks(4, two_layers, kind) for kind in ("plain", "balanced"))
    for a, b in zip(plain, balanced, strict=True):
        for wanted, got in zip(a, b, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)


def checkpointed(group, recompute):
    dispatcher = MoonEPDispatcher(group, 8)
    experts = keep_block(Toy(8), group.rank(), group.size())
    x, ids, logits = tokens_of("nothing for rank 0", group.rank())
    leaf = x.clone().requires_grad_()
    arguments = dispatcher, leaf, ids, logits.softmax(-1), experts
    if recompute:
        out = checkpoint(*arguments, use_reentrant=False)
    else:
        out = arguments[0](*arguments[1:])
    (out * probe(group.rank(), len(x))).sum().backward()
    return out.detach(), leaf.grad, experts.w1.grad, experts.w2.grad


def test_a_checkpointed_layer_plans_the_same_again(ranks):
    once, again = ranks(4, checkpointed, False), ranks(4, checkpointed, True)
    for a, b in zip(once, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def traffic(group, kind, favourites):
    """(rows computed, tokens arriving from others, bytes sent less their lower bound)."""
    dispatcher = KINDS[kind](group, 8)
    experts = keep_block(Toy(8), group.rank(), group.size())
    x, ids, logits = draw_tokens(60, 8, 2, group.rank(), favourites)
    out = dispatcher(x.requires_grad_(), ids, logits.softmax(-1), experts)
    out.sum().backward()
    if kind == "plain":
        leaving, arriving = across(ids.view(-1) // 2, group)
        return dispatcher.rows, arriving, None
    transport = dispatcher.transport
    counts = transport.share_counts(torch.bincount(ids.view(-1), minlength=8))
    tokens = map_tokens(ids, lay_out(counts, allocate(counts)), group.rank())
    leaving, arriving = across(tokens.rank[tokens.travels], group)
    # two dispatches of the input, one of the gradient, two returns
    bound = (3 * leaving + 2 * arriving) * LATENT * 4
    return dispatcher.rows, arriving, transport.sent.tokens - bound


def across(to, group):
    """How many of this rank's sendings go to other ranks, and how many of theirs come here."""
    everyone = torch.zeros(group.size(), group.size(), dtype=torch.int64)
    everyone[group.rank()] = torch.bincount(to, minlength=group.size())
    torch.distributed.all_reduce(everyone, group=group)
    everyone.fill_diagonal_(0)
    return int(everyone[group.rank()].sum()), int(everyone[:, group.rank()].sum())


def test_balanced_ranks_work_alike_whatever_the_skew_and_plain_ones_do_not(ranks):
    even, skewed = list(range(8)), [0, 1, 2]
    for favourites in (even, skewed):
        for rows, arriving, excess in ranks(4, traffic, "balanced", favourites):
            assert rows == 120
            assert arriving <= 120
            assert excess == 0
    rows, arriving, _ = zip(*ranks(4, traffic, "plain", skewed), strict=True)
    assert max(rows) > 2.5 * 120
    assert max(arriving) > 1.5 * 120
    assert min(rows) == 0


def identity(group):
    """Experts that return their input: dispatch and return give back k times the token, exactly."""
    transport = Collectives(group)
    x, ids, _ = draw_tokens(40, 8, 2, group.rank(), [0, 1, 2])
    x = (x * 8).round()
    counts = transport.share_counts(torch.bincount(ids.view(-1), minlength=8))
    layout = lay_out(counts, allocate(counts))
    pairs = torch.arange(ids.numel(), dtype=torch.float32).view_as(ids)
    route = transport.open(layout, map_tokens(ids, layout, group.rank()), pairs)
    back = transport.gather(route, transport.scatter(route, x))
    return torch.equal(back, 2 * x), torch.equal(transport.gather_values(route, route.weights), pairs)


def test_what_is_dispatched_comes_back_bit_for_bit(ranks):
    for size in (1, 2, 4):
        assert ranks(size, identity) == [(True, True)] * size


def whole_model(group, spread):
    """Loss, gradients and expert rows of a small model whose sequences are shared out over ranks.

    The last three positions of every one of the four sequences are padding.
    """
    from openk3.ops.loss import linear_cross_entropy

    model = K3(preset("nano", initializer_range=0.1), seed=1)
    if spread is not None:
        dispatcher = KINDS[spread](group, 16)
        spread_experts(model, group, dispatcher)
    ids = torch.randint(0, 256, (4, 12), generator=torch.Generator().manual_seed(0))
    mine = ids[group.rank() :: group.size()]
    valid = torch.arange(12).expand(len(mine), 12) < 9
    hidden = model.hidden(mine, valid=valid)[:, :9]
    loss = linear_cross_entropy(
        hidden[:, :-1].reshape(-1, 128)[None], model.lm_head.weight, mine[:, 1:9].reshape(1, -1)
    )
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads, dispatcher.rows if spread else 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_gradient_of_a_model_is_that_of_one_device(ranks, kind, size):
    [(loss, wanted, _)] = ranks(1, whole_model, None)
    found = ranks(size, whole_model, kind)
    rows = [rows for _, _, rows in found]
    assert sum(rows) == 4 * 9 * 4  # padding has no experts
    assert kind == "plain" or rows == [144 // size] * size
    assert sum(part for part, _, _ in found) == pytest.approx(loss, rel=1e-5)
    for name, grad in wanted.items():
        parts = [grads[name] for _, grads, _ in found]
        got = torch.cat(parts) if ".experts.w" in name else sum(parts)
        assert relative_error(got, grad) < 2e-5, name
        if name.endswith("gate.weight"):
            assert grad.abs().max() > 1e-6


def balance(group, num_parts):
    """The biases after a step whose rows, of unequal lengths and padded, are shared out."""
    model = K3(preset("nano", initializer_range=0.1), seed=1).train()
    ids = torch.randint(0, 256, (8, 10), generator=torch.Generator().manual_seed(3))
    valid = torch.arange(10) < torch.tensor([10, 3, 7, 1, 9, 10, 2, 5])[:, None]
    mine = slice(group.rank(), None, num_parts) if group.rank() < num_parts else slice(0, 0)
    calls = []

    def reduce(counts):
        calls.append(counts.dtype)
        torch.distributed.all_reduce(counts, group=group)

    for row, real in zip(ids[mine], valid[mine], strict=True):  # micro-batches of one row
        model.hidden(row[None], valid=real[None])
    model.update_balancing(reduce)
    assert calls == [torch.int32]
    return [router.e_score_correction_bias for router in model.routers().values()]


def test_the_balancing_bias_does_not_know_how_tokens_are_shared_out(ranks):
    [wanted] = ranks(1, balance, 1)
    assert len(wanted) == 4
    assert all(bias.any() for bias in wanted)
    for size, parts in ((2, 2), (4, 4), (4, 3)):  # with three parts one rank has no tokens
        for found in ranks(size, balance, parts):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
