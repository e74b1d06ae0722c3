"""Routed experts, both product backends, in the interpreter: float64 gradients, empty experts."""

import pytest
import torch

from kernel_checks import gradients, poison, relative_error
from openk3.ops.moe import expert_mlp

routed = pytest.importorskip("openk3.ops.moe.routed", exc_type=ImportError)
row_plan = pytest.importorskip("openk3.ops.moe.row_plan", exc_type=ImportError)

TORCH = routed.Choice()
TRITON = routed.Choice(fused_situ=True, triton_rows=True, triton_grads=True)


def case(ids, num_experts, latent=64, inner=64, seed=0, magnitude=8.0):
    """x, weights, w13, w2 with pre-activations of about `magnitude`, and d_out."""
    rng = torch.Generator().manual_seed(seed)
    tokens = ids.shape[0]
    x = torch.randn(tokens, latent, generator=rng)
    w13 = torch.randn(num_experts, 2 * inner, latent, generator=rng) * magnitude / latent**0.5
    w2 = torch.randn(num_experts, latent, inner, generator=rng) / inner**0.5
    weights = torch.rand(*ids.shape, generator=rng) + 0.1
    return [x, weights, w13, w2], torch.randn(tokens, latent, generator=rng)


def ours(ids, choice, join=True, **options):
    def run(x, weights, w13, w2):
        inner = w13.shape[1] // 2
        w1, w3 = w13[:, :inner], w13[:, inner:]
        if not join:
            w1, w3 = w1.contiguous(), w3.contiguous()
        return routed.routed_experts(x, ids, weights, w1, w3, w2, choice=choice, **options)

    return run


def exact(ids):
    def run(x, weights, w13, w2):
        inner = w13.shape[1] // 2
        return expert_mlp(x, ids, weights, w13[:, :inner], w13[:, inner:], w2)

    return run


def compare(ids, num_experts, run, *, tolerance=2e-5, **options):
    inputs, d_out = case(ids, num_experts, **options)
    got = gradients(run, inputs, d_out)
    wanted = gradients(exact(ids), [x.double() for x in inputs], d_out)
    errors = [relative_error(a, b) for a, b in zip(got, wanted, strict=True)]
    assert max(errors) < tolerance, errors
    return got


def spread(counts):
    """ids [T, 1] with counts[e] tokens of expert e, shuffled."""
    flat = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(5))
    return flat[order].view(-1, 1)


@pytest.mark.parametrize("choice", [TORCH, TRITON], ids=["grouped_mm", "triton"])
@pytest.mark.parametrize("counts", [[5, 0, 7, 16], [0, 9, 0, 0], [1, 0, 0, 0]])
def test_output_and_gradients(choice, counts):
    """Uneven, one expert takes all, one token; experts without rows get exactly zero."""
    ids = spread(counts)
    poison("cpu")
    _, _, _, d_w13, d_w2 = compare(ids, 4, ours(ids, choice))
    for expert, count in enumerate(counts):
        if count == 0:
            assert not d_w13[expert].any()
            assert not d_w2[expert].any()


@pytest.mark.parametrize(("magnitude", "join"), [(1.0, True), (50.0, False)])
def test_several_choices_and_separate_weights(magnitude, join):
    rng = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(5, generator=rng)[:3] for _ in range(7)])
    compare(ids, 5, ours(ids, TORCH, join), magnitude=magnitude)


@pytest.mark.parametrize("layout", ["every other", "turned", "padded"])
@pytest.mark.parametrize("choice", [TORCH, TRITON, None], ids=["grouped_mm", "triton", "plain"])
def test_weights_of_any_layout(choice, layout):
    ids = spread([2, 0, 3])
    (x, weights, w13, w2), _ = case(ids, 3)
    dense = [w13[:, :64].contiguous(), w13[:, 64:].contiguous(), w2]
    if layout == "every other":
        views = [torch.stack([w, -w], -1)[..., 0] for w in dense]
    elif layout == "turned":
        views = [w.mT.contiguous().mT for w in dense]
    else:
        views = [torch.cat([w.flatten(1), w[:, 0, :5]], 1)[:, :-5].view(w.shape) for w in dense]
    outs = [
        expert_mlp(x, ids, weights, *w)
        if choice is None
        else routed.routed_experts(x, ids, weights, *w, choice=choice)
        for w in (views, dense)
    ]
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)


def test_more_rows_than_a_tile_and_recomputation():
    ids = spread([130, 40])
    kept = compare(ids, 2, ours(ids, TRITON))
    again = compare(ids, 2, ours(ids, TRITON, recompute=True))
    assert all(torch.equal(a, b) for a, b in zip(kept[:1], again[:1], strict=True))


def test_no_tokens():
    ids = torch.zeros(0, 2, dtype=torch.int64)
    inputs, d_out = case(ids, 3)
    out, dx, d_weights, d_w13, d_w2 = gradients(ours(ids, TORCH), inputs, d_out)
    assert out.shape == (0, 64)
    assert dx.shape == (0, 64)
    assert d_weights.shape == (0, 2)
    assert not d_w13.any()
    assert not d_w2.any()


@pytest.mark.parametrize("align", [1, 64])
def test_plan_is_a_stable_bijection(align):
    rng = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(9, generator=rng)[:4] for _ in range(31)])
    ids[ids == 3] = 4  # an empty expert; ids need not be distinct for the layout
    plan = row_plan.make_plan(ids, 9, align=align)
    flat = ids.flatten()
    assert plan.counts.tolist() == torch.bincount(flat, minlength=9).tolist()
    assert all(start % align == 0 for start in plan.starts.tolist())
    for expert in range(9):
        start, count = int(plan.starts[expert]), int(plan.counts[expert])
        wanted = (flat == expert).nonzero().flatten().tolist()
        assert plan.row_pair[start : start + count].tolist() == wanted
        padding = plan.row_pair[start + count : int(plan.ends[expert])]
        assert (padding == -1).all()
    assert torch.equal(plan.row_pair[plan.row_of_pair.long()].long(), torch.arange(flat.numel()))


SHAPES = {
    "two high": row_plan.Shape((0.6, 1.0), 4),
    "three high": row_plan.Shape((0.5, 0.7, 1.0)),
    "low tiles are dear": row_plan.Shape((0.9, 0.95, 1.0)),
    "one high": row_plan.Shape((1.0,), 3),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("counts", [[70, 0, 300, 129], [0, 1, 0, 0], [1170, 64, 192, 257, 2, 500]])
def test_tiles_cover_every_row_once_largest_expert_first(shape, counts):
    num = len(counts)
    plan = row_plan.make_plan(spread(counts), num, align=64, shape=SHAPES[shape])
    used = int(plan.tiles.num_tiles)
    experts, codes, groups = (t[:used].tolist() for t in plan.tiles[:3])
    covered = torch.zeros(plan.num_rows, dtype=torch.int32)
    for expert, code in zip(experts, codes, strict=True):
        row, height = code // 64 * 64, code % 64
        assert 1 <= height <= len(SHAPES[shape].heights)
        covered[row : row + 64 * height] += 1
        assert int(plan.starts[expert]) <= row
        assert row + 64 * height <= int(plan.ends[expert])
    assert (covered[: int(plan.last_row)] == 1).all()
    assert (covered[int(plan.last_row) :] == 0).all()
    order = sorted(range(num), key=lambda e: -counts[e])
    assert plan.order.tolist() == order
    assert experts == sorted(experts, key=order.index)
    for i, code in enumerate(groups):
        first, size = code // 64, code % 64
        assert first <= i < first + size <= used
        assert size <= SHAPES[shape].group
        assert {experts[j] for j in range(first, first + size)} == {experts[i]}
        assert {groups[j] for j in range(first, first + size)} == {code}


def test_the_cheapest_tiles_are_chosen():
    def split(heights):
        return [
            [number >> 3 * h & 7 for h in range(1, len(heights) + 1)]
            for number in row_plan.best_splits(heights)
        ]

    assert split((0.6, 1.0)) == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert split((0.5, 0.7, 1.0))[4:] == [[0, 2, 0], [0, 1, 1]]
    assert split((0.5, 0.9, 1.0))[4:] == [[1, 0, 1], [0, 1, 1]]


def test_measured_choices_and_refusals():
    from openk3.errors import BackendError
    from openk3.ops.moe.costs import costs_of, measured

    for costs in measured().values():
        for choices in costs:
            assert choices[0][0] == 0
            assert [start for start, _ in choices] == sorted({start for start, _ in choices})
            for _, choice in choices:
                heights = choice.shape.heights
                assert 1 <= len(heights) <= 3
                assert heights[-1] == 1
                assert list(heights) == sorted(heights)
    h200 = costs_of("NVIDIA H200")
    assert h200.choose(64, training=True).fused_situ
    assert h200.choose(1170, training=False).align == 64
    assert costs_of("another GPU").choose(64, training=True) == routed.Choice()
    inputs, _ = case(torch.zeros(1, 1, dtype=torch.int64), 2)
    x, weights, w13, w2 = inputs
    with pytest.raises(BackendError, match="need a CUDA device"):
        expert_mlp(
            x, torch.zeros(1, 1).long(), weights, w13[:, :64], w13[:, 64:], w2, backend="triton"
        )
