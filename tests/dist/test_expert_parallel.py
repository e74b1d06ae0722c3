"""Experts spread over ranks: outputs and every gradient equal those of one device."""

import pytest
import torch
from kernel_checks import poison
from moe_cases import Toy, draw_tokens, one_device, probe

from openk3.parallel.alltoall import AllToAllDispatcher
from openk3.parallel.experts import keep_block

pytestmark = pytest.mark.dist
KINDS = {"plain": AllToAllDispatcher}
CASES = {
    "random": [(13, None), (13, None), (13, None), (13, None)],
    "all to one expert's rank": [(9, [0, 1]), (9, [0, 1]), (9, [0, 1]), (9, [0, 1])],
    "nothing for rank 0": [(11, [2, 3, 4, 5, 6, 7]), (7, [3, 7]), (5, [2, 3]), (11, [6, 7])],
    "a rank without tokens": [(6, None), (0, None), (9, [4, 5, 7]), (3, None)],
    "no tokens at all": [(0, None), (0, None), (0, None), (0, None)],
}


def tokens_of(case, rank, padding=0.0):
    num_tokens, favourites = CASES[case][rank]
    return draw_tokens(num_tokens, 8, 2, 7 + rank, favourites, padding)


def three_steps(group, kind, case, padding=0.0):
    """Forward and backward three times over poisoned memory; gradients must not change."""
    dispatcher = KINDS[kind](group, 8)
    x, ids, logits = tokens_of(case, group.rank(), padding)
    results = []
    for _ in range(3):
        poison("cpu", 1)
        experts = keep_block(Toy(8), group.rank(), group.size())
        leaf, scores = x.clone().requires_grad_(), logits.clone().requires_grad_()
        out = dispatcher(leaf, ids, scores.softmax(-1), experts)
        (out * probe(group.rank(), len(x))).sum().backward()
        grads = [w.grad for w in (experts.w1, experts.w3, experts.w2)]
        results.append([out.detach(), leaf.grad, scores.grad, *grads])
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
