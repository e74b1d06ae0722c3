"""The router kernels in the interpreter against the reference router."""

import pytest
import torch

from kernel_checks import gradients, relative_error
from openk3.errors import InputError
from openk3.ops import moe
from openk3.ops.moe import count_margins, route

kernels = pytest.importorskip("openk3.ops.moe.triton_entrance", exc_type=ImportError)


def latent_route(x, router, down, bias, top_k, scaling=1.0, *, counts=None, valid=None, **options):
    return kernels.latent_route_triton(
        x, router, down, bias, top_k, scaling, counts, valid, **options
    )


def draw(tokens=13, width=64, num_experts=20, latent=32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=rng)
    router = torch.randn(num_experts, width, generator=rng) / width**0.5
    down = torch.randn(latent, width, generator=rng) / width**0.5
    bias = 0.3 * torch.randn(num_experts, generator=rng)
    return x, router, down, bias


def test_choice_weights_and_latent():
    x, router, down, bias = draw()
    got = latent_route(x, router, down, bias, 4, 2.0)
    wanted = route(x, router, bias, 4, 2.0)
    assert torch.equal(got.ids, wanted.ids)
    torch.testing.assert_close(got.weights, wanted.weights, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got.cutoff, wanted.cutoff, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got.latent, x @ down.T, atol=1e-5, rtol=1e-5)


def test_gradients():
    x, router, down, bias = draw(seed=1)
    rng = torch.Generator().manual_seed(2)
    d_latent, d_weights = torch.randn(13, 32, generator=rng), torch.randn(13, 3, generator=rng)

    def kernel(x, router, down):
        out = latent_route(x, router, down, bias, 3)
        return (out.latent * d_latent).sum() + (out.weights * d_weights).sum()

    def exact(x, router, down):
        weights = route(x, router, bias, 3).weights
        return (x @ down.T * d_latent).sum() + (weights * d_weights).sum()

    one = torch.ones(())
    got = gradients(kernel, (x, router, down), one)
    wanted = gradients(exact, [t.double() for t in (x, router, down)], one)
    for a, b in zip(got, wanted, strict=True):
        assert relative_error(a, b) < 2e-6


def test_histogram_adds_up_and_skips_padding():
    x, router, down, bias = draw(seed=3)
    valid = torch.arange(13) % 3 != 0
    counts = torch.zeros(20, 1000, dtype=torch.int32)
    latent_route(x[:6], router, down, bias, 4, counts=counts, valid=valid[:6])
    latent_route(x[6:], router, down, bias, 4, counts=counts, valid=valid[6:])
    wanted = route(x, router, bias, 4)
    exact = count_margins(wanted.scores, wanted.cutoff, bias, valid)
    assert counts.sum() == 20 * int(valid.sum())
    # sigmoids differ in the last bit: a margin on an edge may fall into the neighbouring bin
    assert (counts.cumsum(1) - exact.cumsum(1)).abs().max() <= 1
    before = counts.clone()
    latent_route(x, router, down, bias, 4)
    assert torch.equal(counts, before)


def test_equal_scores_take_the_lowest_ids():
    x, router, down, _ = draw()
    counts = torch.zeros(20, 1000, dtype=torch.int32)
    out = latent_route(x, torch.zeros_like(router), down, torch.zeros(20), 4, counts=counts)
    assert (out.ids == torch.arange(4)).all()
    assert torch.equal(out.weights, torch.full_like(out.weights, 0.25))
    assert counts.sum() == 13 * 20


def test_a_nan_names_experts_that_exist():
    """Its row's weights are NaN; the other rows are as they were."""
    triton_router = pytest.importorskip("openk3.ops.moe.triton_router", exc_type=ImportError)
    logits, bias = torch.randn(6, 20), torch.zeros(20)
    before = triton_router.choose(logits, bias, 4, 1.0)
    logits[2], logits[4, 7] = torch.nan, torch.nan
    ids, weights, *_ = triton_router.choose(logits, bias, 4, 1.0)
    assert [len({*row} & {*range(20)}) for row in ids.tolist()] == [4] * 6
    assert 7 in ids[4]
    assert weights[[2, 4]].isnan().all()
    kept = [0, 1, 3, 5]
    assert torch.equal(ids[kept], before[0][kept])
    assert torch.equal(weights[kept], before[1][kept])


def test_wrong_shapes_are_refused():
    x, router, down, bias = draw()
    counts, valid = torch.zeros(20, 1000, dtype=torch.int32), torch.ones(len(x), dtype=torch.bool)
    for named, args, options in (
        ("between 1 and E - 1 = 19", (x, router, down, bias, 20), {}),
        ("between 1 and E - 1 = 19", (x, router, down, bias, 0), {}),
        (r"bias \[E\] must be \[20\]", (x, router, down, bias[:1], 4), {}),
        ("down must be", (x, router, down[:, 1:], bias, 4), {}),
        ("counts must be of integers", (x, router, down, bias, 4), {"counts": counts.float()}),
        ("counts must be int32", (x, router, down, bias, 4), {"counts": counts.long()}),
        (r"counts must be \[20, 1000\]", (x, router, down, bias, 4), {"counts": counts[1:]}),
        ("valid must be of bool", (x, router, down, bias, 4), {"valid": valid.long()}),
        (rf"valid must be \[{len(x)}\]", (x, router, down, bias, 4), {"valid": valid[1:]}),
    ):
        with pytest.raises(InputError, match=named):
            moe.latent_route(*args, **options)


def test_plain_torch_counts_the_same():
    x, router, down, bias = draw(seed=8)
    valid = torch.arange(13) % 3 != 0
    ours, plain = (torch.zeros(20, 1000, dtype=torch.int32) for _ in range(2))
    got = latent_route(x, router, down, bias, 4, counts=ours, valid=valid)
    wanted = moe.latent_route(x, router, down, bias, 4, counts=plain, valid=valid)
    assert torch.equal(got.ids, wanted.ids)
    torch.testing.assert_close(got.latent, wanted.latent, atol=1e-5, rtol=1e-5)
    assert (ours.cumsum(1) - plain.cumsum(1)).abs().max() <= 1


def test_router_alone_and_its_histogram():
    """The model's own entry points, through the kernels."""
    kernels = pytest.importorskip("openk3.ops.moe.triton_router", exc_type=ImportError)
    x, router, _, bias = draw(seed=5)
    got = kernels.route_triton(x, router, bias, 4, 1.5)
    wanted = route(x, router, bias, 4, 1.5)
    assert torch.equal(got.ids, wanted.ids)
    for a, b in ((got.weights, wanted.weights), (got.scores, wanted.scores)):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    d_weights = torch.randn(13, 4, generator=torch.Generator().manual_seed(6))
    one = gradients(
        lambda x, w: kernels.route_triton(x, w, bias, 4, 1.5).weights, (x, router), d_weights
    )
    two = gradients(
        lambda x, w: route(x, w, bias, 4, 1.5).weights, (x.double(), router.double()), d_weights
    )
    assert max(relative_error(a, b) for a, b in zip(one, two, strict=True)) < 2e-6
    valid = torch.arange(13) % 4 != 1
    for mask in (None, valid):
        counts = kernels.count_margins_triton(wanted.scores, wanted.cutoff, bias, mask)
        assert torch.equal(counts, count_margins(wanted.scores, wanted.cutoff, bias, mask))
