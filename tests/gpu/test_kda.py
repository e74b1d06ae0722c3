"""KDA on a GPU: every shape and gate the kernels must survive, against float64; bitwise repeats."""

import pytest
import torch

from kernel_checks import poison, relative_error
from openk3.errors import BackendError, InputError
from openk3.ops.conv import short_conv
from openk3.ops.kda import kda
from openk3.ops.kda.call import KdaCall
from openk3.ops.kda.decode import Pending, kda_decode

pytestmark = pytest.mark.gpu
BF16 = 6e-3  # a few roundings of 2^-9 in series


def draw(batch, tokens, heads, width, num_seqs, *, seed=0, gate=1.0, dtype=torch.bfloat16):
    rng = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, device="cuda")

    x = {name: normal(batch, tokens, heads, width) for name in ("q", "k", "v", "g")}
    x["g"] = x["g"] * gate
    x["beta"] = normal(batch, tokens, heads)
    x = {name: t.to(dtype) for name, t in x.items()}
    x["A_log"], x["dt_bias"] = normal(heads) * 0.5, normal(heads * width) * 0.5
    x["initial_state"] = normal(num_seqs, heads, width, width)
    return x


def run(x, cu_seqlens=None, backend="triton", segment=None, wide=False):
    """[o, final state, gradients of all inputs] of a random functional."""
    poison("cuda")
    leaves = {n: (t.double() if wide else t).detach().requires_grad_() for n, t in x.items()}
    if segment is None:
        o, final = kda(**leaves, cu_seqlens=cu_seqlens, output_final_state=True, backend=backend)
    else:
        from openk3.ops.kda.triton_op import kda_triton

        bounds = {"lower_bound": -5.0, "scale": x["q"].shape[-1] ** -0.5}
        call = KdaCall(**leaves, **bounds, cu_seqlens=cu_seqlens, output_final_state=True)
        o, final = kda_triton(call, segment)
    rng = torch.Generator("cuda").manual_seed(7)
    d_o = torch.randn(o.shape, generator=rng, device="cuda").to(x["q"].dtype).to(o.dtype)
    d_final = torch.randn(final.shape, generator=rng, device="cuda").to(final.dtype)
    return [o, final, *torch.autograd.grad([o, final], list(leaves.values()), [d_o, d_final])]


def sum_error(x, got, wanted):
    """Error of dA_log = sum of dg (g + dt_bias), relative to the sum's terms rather than to what
    is left of them: with one head it is a single number, which may be next to nothing."""
    at = 2 + list(x).index("A_log")
    z = x["g"].double() + x["dt_bias"].double().view(x["g"].shape[2:])
    terms = (wanted[2 + list(x).index("g")] * z).norm()
    return float((got[at].double() - wanted[at]).norm() / torch.maximum(terms, wanted[at].norm()))


def check(x, cu_seqlens=None, *, segment=None, tolerance=BF16, loose=(), skip=()):
    names = ["o", "final", *x]
    got = run(x, cu_seqlens, segment=segment)
    wanted = run(x, cu_seqlens, backend="reference", wide=True)
    errors = {n: relative_error(a, b) for n, a, b in zip(names, got, wanted, strict=True)}
    errors["A_log"] = sum_error(x, got, wanted)
    limits = {n: tolerance * (4 if n in ("beta", "A_log", "dt_bias", *loose) else 1) for n in names}
    bad = {n: e for n, e in errors.items() if n not in skip and not e < limits[n]}
    assert bad == {}


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 1000])
def test_lengths(tokens, heads):
    check(draw(1, tokens, heads, 128, 1, seed=tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 128])
def test_widths_and_dtypes(width, dtype):
    check(draw(2, 200, 2, width, 2, dtype=dtype))


@pytest.mark.parametrize("segment", [None, 256])
def test_packed_documents(segment):
    offsets = torch.tensor([0, 1, 6, 6, 22, 90, 1000, 1000], device="cuda")
    check(draw(1, 1000, 2, 128, 7), offsets, segment=segment)


def test_weak_decay_over_segments():
    x = draw(1, 1024, 2, 128, 1, gate=0.1)
    x["g"] -= 9.0
    check(x, segment=256, tolerance=2 * BF16, skip=("g", "A_log", "dt_bias"))


def test_steepest_decay():
    x = draw(1, 300, 2, 128, 1)
    x["g"] = torch.full_like(x["g"], 40.0)
    check(x, skip=("g", "A_log", "dt_bias"))


def test_equal_keys_without_decay():
    """Repeated tokens: the tile inverse at its worst, and updates that all but cancel."""
    x = draw(1, 200, 2, 128, 1)
    x["k"] = x["k"][:, :1].expand_as(x["k"]).contiguous()
    x["g"] -= 20.0
    x["beta"] += 6.0
    x["initial_state"] *= 0
    got, wanted = run(x), run(x, backend="reference", wide=True)
    assert relative_error(got[0], wanted[0]) < 4 * BF16
    assert relative_error(got[1], wanted[1]) < 4 * BF16


def test_offsets_beyond_32_bits():
    """A row of more than 2^31 elements: its end is computed like a row of its own."""
    heads, tokens = 64, 270_000
    x = {
        name: torch.zeros(1, tokens, heads, 128, dtype=torch.bfloat16, device="cuda")
        for name in ("q", "k", "v", "g")
    }
    x["beta"] = torch.zeros(1, tokens, heads, dtype=torch.bfloat16, device="cuda")
    tail = draw(1, 100, heads, 128, 1)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, -100:] = tail[name]
    rest = {"A_log": tail["A_log"], "dt_bias": tail["dt_bias"]}
    offsets = torch.tensor([0, tokens - 100, tokens], device="cuda")
    with torch.no_grad():
        o, _ = kda(**x, **rest, cu_seqlens=offsets, backend="triton")
        alone, _ = kda(**{n: tail[n] for n in x}, **rest, backend="triton")
    assert torch.equal(o[:, -100:], alone)


@pytest.mark.parametrize("segment", [None, 256])
def test_bitwise_the_same_over_200_runs(segment):
    offsets = torch.tensor([0, 300, 811, 1024], device="cuda")
    x = draw(1, 1024, 4, 128, 3)
    first = run(x, offsets, segment=segment)
    for _ in range(199):
        again = run(x, offsets, segment=segment)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_states_at_positions():
    offsets = torch.tensor([0, 5, 5, 700, 1000], device="cuda")
    positions = torch.tensor([4, 68, 132, 699, 500, 999, 763, 5], device="cuda")
    x = draw(1, 1000, 2, 128, 4)
    with torch.no_grad():
        got = kda(**x, cu_seqlens=offsets, state_positions=positions, backend="triton")
        wide = {n: t.double() for n, t in x.items()}
        wanted = kda(**wide, cu_seqlens=offsets, state_positions=positions, backend="reference")
    assert relative_error(got[0], wanted[0]) < BF16
    assert relative_error(got[2], wanted[2]) < BF16


def test_defaults_and_refusals():
    x = draw(1, 20, 2, 128, 1)
    chosen, _ = kda(**x)
    assert torch.equal(chosen, kda(**x, backend="triton")[0])
    with pytest.raises(BackendError, match="K = V of 64 or 128"):
        kda(**draw(1, 20, 2, 32, 1), backend="triton")
    with pytest.raises(BackendError, match="bfloat16"):
        kda(**{n: t.float() for n, t in x.items()}, backend="triton")
    assert kda(**draw(1, 20, 2, 32, 1))[0].isfinite().all()  # the reference takes it


def test_strided_inputs():
    """Strided inputs are read in place, dense or not."""
    x = draw(1, 100, 2, 128, 1)
    wide = torch.randn(1, 100, 5, 2, 128, device="cuda").bfloat16()
    strided = dict(x)
    for index, name in enumerate(("q", "k", "v", "g")):
        wide[:, :, index] = x[name]
        strided[name] = wide[:, :, index]
    strided["beta"] = x["beta"].transpose(1, 2).contiguous().transpose(1, 2)
    strided["v"] = x["v"].mT.contiguous().mT  # not even its rows are dense
    for a, b in zip(run(strided), run(x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("k", (1, 20, 2, 64)),
        ("g", (1, 20, 2)),
        ("beta", (1, 20, 3)),
        ("A_log", (3,)),
        ("dt_bias", (128,)),
        ("initial_state", (2, 2, 128, 128)),
    ],
)
def test_wrong_shapes_are_refused(name, wrong):
    x = draw(1, 20, 2, 128, 1)
    with pytest.raises(InputError, match=name):
        kda(**x | {name: torch.zeros(wrong, device="cuda")})


def test_wrong_dtypes_and_devices_are_refused():
    x = draw(1, 20, 2, 128, 1)
    with pytest.raises(InputError, match="floating point"):
        kda(**x | {"g": x["g"].int()})
    with pytest.raises(InputError, match="v is on cpu"):
        kda(**x | {"v": x["v"].cpu()})


def test_compiled_graph_does_not_break():
    x = draw(1, 100, 2, 128, 1)

    def loss(x):
        return kda(**x)[0].float().square().sum()

    leaves = {n: t.requires_grad_() for n, t in x.items()}
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(leaves), list(leaves.values()))
    wanted = torch.autograd.grad(loss(leaves), list(leaves.values()))
    assert [relative_error(a, b) < 1e-6 for a, b in zip(got, wanted, strict=True)] == [True] * 8


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("offsets", [None, [0, 1, 1, 70, 1000]])
def test_short_convolution(offsets, with_state):
    rng = torch.Generator("cuda").manual_seed(0)
    num = 1 if offsets is None else len(offsets) - 1
    x, d_y = (torch.randn(1, 1000, 384, generator=rng, device="cuda") for _ in range(2))
    weight = torch.randn(384, 1, 4, generator=rng, device="cuda")
    initial = torch.randn(num, 4, 384, generator=rng, device="cuda").bfloat16()
    cu = None if offsets is None else torch.tensor(offsets, device="cuda")
    results = []
    for backend, dtype in (("triton", torch.bfloat16), ("reference", torch.float64)):
        poison("cuda")
        leaves = [x.bfloat16().to(dtype).requires_grad_(), weight.clone().requires_grad_()]
        state = initial.to(dtype).requires_grad_() if with_state else None
        y, final = short_conv(
            leaves[0],
            leaves[1],
            initial_state=state,
            cu_seqlens=cu,
            output_final_state=True,
            backend=backend,
        )
        leaves += [state] if with_state else []
        grads = torch.autograd.grad([y], leaves, [d_y.bfloat16().to(dtype)])
        results.append([y, final, *grads])
    errors = [relative_error(a, b) for a, b in zip(*results, strict=True)]
    assert [e < 3e-3 for e in errors] == [True] * len(errors)


def normal_numbers(seed):
    """A function that draws them, bfloat16 unless told otherwise."""
    rng = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=rng, device="cuda").to(dtype)

    return normal


def decode_weights(normal, heads, width):
    f32 = torch.float32
    return {
        "conv_weight": normal(3, 4, heads, width, dtype=f32),
        "A_log": normal(heads, dtype=f32) * 0.5,
        "dt_bias": normal(heads * width, dtype=f32) * 0.5,
        "norm_weight": normal(width, dtype=f32),
        "lower_bound": -5.0,
    }


@pytest.mark.parametrize("capacity", [8, 12])
@pytest.mark.parametrize("width", [64, 128])
def test_decode_and_replay_are_the_reference(width, capacity):
    """A capacity of 8 is one launch; with 12 pending and new tokens do not fit in one tile."""
    heads, slots, normal = 3, 6, normal_numbers(seed=1)

    def projections(tokens):
        shape = (4, tokens, heads, width)
        return [*(normal(*shape) for _ in range(4)), normal(*shape[:3]), normal(*shape)]

    weights = decode_weights(normal, heads, width)
    weights["slots"] = torch.tensor([5, -1, 0, 2], device="cuda")
    conv_state = normal(slots, 3, 4, heads, width)
    state = normal(slots, heads, width, width, dtype=torch.float32)
    pools = [{"conv_state": conv_state.clone(), "state": state.clone()} for _ in range(2)]
    blank = [torch.zeros(slots, capacity, *t.shape[2:], device="cuda") for t in projections(1)[:5]]
    windows = [Pending(*(t.bfloat16() for t in blank)) for _ in range(2)]
    calls = [(projections(1), None), (projections(3), None)]
    calls += [
        (projections(8), [0, 0, 0, 0]),
        (projections(5), [8, 1, 0, 3]),
        (projections(8), [5] * 4),
    ]
    for inputs, kept in calls:
        outs = []
        for backend, pool, window in zip(("triton", "reference"), pools, windows, strict=True):
            extra = {}
            if kept is not None:
                extra = {"pending": window, "accepted": torch.tensor(kept, device="cuda")}
            outs.append(kda_decode(*inputs, **pool, **weights, **extra, backend=backend))
        assert relative_error(*outs) < 3e-3
        assert relative_error(pools[0]["state"], pools[1]["state"]) < 1e-4
        assert torch.equal(pools[0]["conv_state"], pools[1]["conv_state"])


@pytest.mark.parametrize("apart", [0, 128, 4])
def test_decode_of_many_states(apart):
    """Slots in any order, some of them padding, some apart; the others are not touched."""
    rows, heads, width, slots, normal = 13, 96, 128, 15, normal_numbers(seed=2)
    weights = decode_weights(normal, heads, width)
    order = [5, -1, 0, 2, 14, 13, 12, 9, -1, 7, 6, 1, -1]
    weights["slots"] = torch.tensor(order, device="cuda")
    state = normal(slots, heads * width * width + apart, dtype=torch.float32)
    conv_state = normal(slots, 3, 4, heads, width)
    shape = (heads, width, width)
    pools = []
    for _ in range(2):
        flat = state.clone()
        pool = flat[:, : heads * width * width].unflatten(1, shape)
        pools.append({"conv_state": conv_state.clone(), "state": pool, "all": flat})
    for _ in range(3):
        x = [normal(rows, 1, heads, width) for _ in range(5)]
        inputs = [*x[:4], normal(rows, 1, heads), x[4]]
        outs = []
        for backend, pool in zip(("triton", "reference"), pools, strict=True):
            memory = {name: pool[name] for name in ("conv_state", "state")}
            poison("cuda")
            outs.append(kda_decode(*inputs, **memory, **weights, backend=backend))
        assert relative_error(*outs) < 3e-3
        assert outs[0][1].abs().max() == 0  # padding
        assert relative_error(pools[0]["state"], pools[1]["state"]) < 1e-4
        assert torch.equal(pools[0]["conv_state"], pools[1]["conv_state"])
    used = heads * width * width
    assert torch.equal(pools[0]["all"][:, used:], state[:, used:])
    for slot in (3, 4, 8, 10, 11):
        assert torch.equal(pools[0]["all"][slot], state[slot])
