"""Quantile Balancing: the figures of the report, exactness, and independence of the partition."""

import pytest
import torch

from openk3.errors import InputError
from openk3.ops.moe import count_margins, exact_bias, histogram_bias, max_violation, route

EXPERTS, TOP_K, TOKENS = 896, 16, 16384


def draw_scores(popularity, rng):
    noise = torch.randn(TOKENS, EXPERTS, generator=rng)
    return torch.sigmoid(popularity + noise)


def choose(scores, bias):
    best = (scores + bias).topk(TOP_K + 1, dim=1)
    load = torch.bincount(best.indices[:, :TOP_K].reshape(-1), minlength=EXPERTS)
    return best.values[:, TOP_K], load


@pytest.mark.parametrize("estimator", ["exact", "histogram"])
def test_two_updates_balance_a_fresh_batch(estimator):
    before, after = [], []
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        popularity = torch.randn(EXPERTS, generator=rng)  # log-normal odds
        bias = torch.zeros(EXPERTS)
        for step in range(3):
            scores = draw_scores(popularity, rng)
            cutoff, load = choose(scores, bias)
            if step in (0, 2):
                (before if step == 0 else after).append(max_violation(load))
            if estimator == "exact":
                bias = exact_bias(scores, cutoff, TOP_K)
            else:
                bias = histogram_bias(count_margins(scores, cutoff, bias), bias, TOP_K)
    assert sorted(before)[1] > 5
    assert sorted(after)[1] < 0.5


def test_histogram_is_bitwise_the_same_for_any_partition_and_near_exact():
    rng = torch.Generator().manual_seed(1)
    scores = torch.rand(4096, 64, generator=rng)
    bias = torch.randn(64, generator=rng) * 0.1
    cutoff = (scores + bias).topk(5, dim=1).values[:, 4]
    results = []
    for parts in (1, 2, 8, 64):
        pieces = zip(scores.chunk(parts), cutoff.chunk(parts), strict=True)
        counts = torch.stack([count_margins(s, c, bias) for s, c in pieces]).sum(0)
        results.append(histogram_bias(counts, bias, 4))
    assert all(torch.equal(results[0], other) for other in results[1:])
    width = float(bias.max() - bias.min() + 2) / 1000
    assert (results[0] - exact_bias(scores, cutoff, 4)).abs().max() < 2 * width


def test_what_does_not_fit_is_named():
    scores, cutoff, bias = torch.rand(6, 4), torch.rand(6), torch.zeros(4)
    real = torch.ones(6, dtype=torch.bool)
    for named, call in (
        (r"cutoff must be \[6\]", lambda: count_margins(scores, cutoff[:1], bias)),
        (r"bias must be \[4\]", lambda: count_margins(scores, cutoff, bias[:1])),
        ("valid must be of bool", lambda: count_margins(scores, cutoff, bias, real.float())),
        (r"valid must be \[6\]", lambda: count_margins(scores, cutoff, bias, real[1:])),
        ("at least one token", lambda: exact_bias(scores[:0], cutoff[:0], 2)),
        (r"counts must be \[4, 1000\]", lambda: histogram_bias(torch.zeros(4, 9).int(), bias, 2)),
    ):
        with pytest.raises(InputError, match=named):
            call()


def test_example_of_eight_tokens_and_four_experts():
    """Loads (4, 3, 1, 0) become (2, 2, 2, 2) with k = 1."""
    scores = torch.tensor(
        [
            [0.90, 0.30, 0.20, 0.10],
            [0.80, 0.40, 0.30, 0.25],
            [0.70, 0.35, 0.45, 0.15],
            [0.60, 0.20, 0.50, 0.40],
            [0.30, 0.80, 0.20, 0.10],
            [0.20, 0.75, 0.30, 0.45],
            [0.25, 0.65, 0.35, 0.55],
            [0.10, 0.40, 0.85, 0.20],
        ]
    )
    best = scores.topk(2, dim=1)
    assert torch.bincount(best.indices[:, 0], minlength=4).tolist() == [4, 3, 1, 0]
    bias = torch.zeros(4)
    for _ in range(8):
        cutoff = (scores + bias).topk(2, dim=1).values[:, 1]
        bias = exact_bias(scores, cutoff, 1)
    load = torch.bincount((scores + bias).argmax(1), minlength=4)
    assert load.tolist() == [2, 2, 2, 2]


def test_padding_and_empty_steps():
    scores, bias = torch.rand(32, 8), torch.randn(8) * 0.1
    cutoff = (scores + bias).topk(3, dim=1).values[:, 2]
    valid = torch.arange(32) < 20
    masked = count_margins(scores, cutoff, bias, valid)
    assert torch.equal(masked, count_margins(scores[:20], cutoff[:20], bias))
    empty = count_margins(scores[:0], cutoff[:0], bias)
    assert torch.equal(histogram_bias(empty, bias, 2), bias)


def test_router_weights_use_scores_without_bias():
    x, weight = torch.randn(10, 6), torch.randn(5, 6)
    bias = torch.tensor([9.0, 0.0, 0.0, 0.0, 0.0])
    routing = route(x, weight, bias, 2)
    assert (routing.ids == 0).any(1).all()
    scores = torch.sigmoid(x @ weight.T)
    chosen = scores.gather(1, routing.ids)
    torch.testing.assert_close(routing.weights, chosen / chosen.sum(1, keepdim=True))
    third = (scores + bias).sort(1, descending=True).values[:, 2]
    torch.testing.assert_close(routing.cutoff, third)
