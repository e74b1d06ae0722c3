"""The balanced plan on 20,000 random and adversarial count matrices."""

import os

import numpy as np
import pytest
import torch

from openk3.errors import InputError
from openk3.parallel.moonep import plan
from openk3.parallel.moonep.planner import capacities

NUM_MATRICES = int(os.environ.get("OPENK3_PLAN_MATRICES", "4000"))
"""Of each of five kinds."""


def flat_counts(rng, ranks, experts):
    return rng.integers(0, 9, (ranks, experts))


def sparse_counts(rng, ranks, experts):
    return rng.integers(0, 200, (ranks, experts)) * (rng.random(experts) < 0.2)


def skewed_counts(rng, ranks, experts):
    return rng.multinomial(500, rng.dirichlet(np.full(experts, 0.1)), size=ranks)


def one_takes_all(rng, ranks, experts):
    counts = np.zeros((ranks, experts), np.int64)
    counts[:, rng.integers(experts)] = rng.integers(0, 300, ranks)
    return counts


def nothing_for_one_rank(rng, ranks, experts):
    """Appendix E's tight case: a rank whose experts are never chosen, the others alike."""
    counts = np.full((ranks, experts), rng.integers(1, 20))
    block, idle = experts // ranks, rng.integers(ranks)
    counts[:, idle * block : (idle + 1) * block] = 0
    return counts


KINDS = [flat_counts, sparse_counts, skewed_counts, one_takes_all, nothing_for_one_rank]


def check(counts):
    num_ranks, num_experts = counts.shape
    found = plan(counts)
    alloc, block = found.alloc, num_experts // num_ranks
    assert alloc.shape == counts.shape
    assert alloc.min() >= 0
    assert (alloc.sum(0) == counts.sum(0)).all()
    assert (alloc.sum(1) == capacities(int(counts.sum()), num_ranks)).all()
    moved = alloc.reshape(num_ranks, num_ranks, block).sum(2)
    np.fill_diagonal(moved, 0)
    assert ((moved > 0).sum(1) <= 1).all()  # one donor
    for rank, copies in enumerate(found.redundant):
        assert len(copies) <= block
        foreign = [e for e in np.flatnonzero(alloc[rank]) if e // block != rank]
        assert copies == foreign
    load = counts.sum(0).reshape(num_ranks, block).sum(1)
    if (load == capacities(int(counts.sum()), num_ranks)).all():
        assert not any(found.redundant)


@pytest.mark.parametrize("kind", KINDS, ids=lambda f: f.__name__)
def test_every_invariant(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(NUM_MATRICES):
        ranks = int(rng.integers(1, 9))
        check(kind(rng, ranks, ranks * int(rng.integers(1, 8))))


@pytest.mark.parametrize("num_ranks", [8, 32, 64, 128])
def test_the_tight_case_of_k3_needs_as_many_copies_as_the_theorem_says(num_ranks):
    counts = nothing_for_one_rank(np.random.default_rng(0), num_ranks, 896)
    check(counts)
    copies = max(len(c) for c in plan(counts).redundant)
    assert copies == -(-896 * (num_ranks - 1) // num_ranks**2)


def test_a_plan_is_a_function_of_its_counts_alone():
    counts = skewed_counts(np.random.default_rng(5), 8, 64)
    first, again = plan(torch.from_numpy(counts)), plan(counts.tolist())
    assert isinstance(first.alloc, torch.Tensor)
    assert (first.alloc.numpy() == again.alloc).all()
    assert first.redundant == again.redundant
    # only how much of each expert there is matters, not which rank holds it
    assert (plan(counts[::-1]).alloc == again.alloc).all()


def test_ties_go_to_the_smaller_index():
    # ranks 0 and 1 have 4 too many each, ranks 2 and 3 have 4 too few
    found = plan([[4, 4, 4, 4, 0, 0, 0, 0]] * 4)
    assert found.redundant == [[], [], [0], [2]]
    assert found.alloc[2].tolist() == [16, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (np.ones((3, 8), int), "8 experts do not divide by 3 ranks"),
        (np.ones(8, int), "matrix"),
        (np.ones((0, 8), int), "matrix"),
        (np.ones((2, 8)), "integers"),
        (-np.ones((2, 8), int), "at least 0"),
    ],
)
def test_counts_that_mean_nothing_are_refused(counts, words):
    with pytest.raises(InputError, match=words):
        plan(counts)
