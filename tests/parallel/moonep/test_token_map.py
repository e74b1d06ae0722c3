"""The token map is a bijection onto the rows of the plan, for every rank at once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.parallel.moonep import plan
from openk3.parallel.moonep.planner import capacities
from openk3.parallel.moonep.token_map import copies_pay, lay_out, map_tokens


def draw(rng, ranks, experts, top_k, most, favourites):
    """ids [T_r, k] of each rank, some of them padding; chosen among the first `favourites`."""
    found = []
    for _ in range(ranks):
        tokens = int(rng.integers(0, most + 1))
        ids = rng.random((tokens, favourites)).argsort(1)[:, :top_k] * experts // favourites
        ids[rng.random(tokens) < 0.15] = -1
        found.append(torch.from_numpy(ids.astype(np.int64)))
    return found


def counts_of(parts, experts):
    return torch.stack([torch.bincount(p[p >= 0], minlength=experts) for p in parts])


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 4, 64]), st.booleans())
def test_every_pair_has_one_row_of_its_expert(seed, align, share):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 6))
    experts = ranks * int(rng.integers(1, 5))
    top_k = int(rng.integers(1, min(4, experts) + 1))
    parts = draw(rng, ranks, experts, top_k, 12, int(rng.integers(top_k, experts + 1)))
    counts = counts_of(parts, experts)
    found = plan(counts)
    layout = lay_out(counts, found.alloc, align)
    maps = [map_tokens(p, layout, r, share_copies=share) for r, p in enumerate(parts)]

    block = experts // ranks
    for rank in range(ranks):
        copies = layout.redundant[rank]
        assert copies[copies >= 0].tolist() == found.redundant[rank]
        expert_of_row = torch.full((int(layout.sizes[rank].sum()),), -1)
        for source, (ids, m) in enumerate(zip(parts, maps, strict=True)):
            here = m.rank == rank
            assert int(here.sum()) == int(layout.received(rank)[source])
            rows = m.row[here]
            assert (expert_of_row[rows] == -1).all(), "two pairs share a row"
            expert_of_row[rows] = ids.reshape(-1)[here]
        used = expert_of_row >= 0
        assert int(used.sum()) == capacities(int(counts.sum()), ranks)[rank]
        if align == 1:
            assert used.all()
        experts_here = [*range(rank * block, (rank + 1) * block), *copies.tolist()]
        pieces = expert_of_row.split(layout.sizes[rank].tolist())
        for expert, rows in zip(experts_here, pieces, strict=True):
            assert len(rows) % align == 0
            assert set(rows.tolist()) <= {expert, -1}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31))
def test_a_token_travels_once_to_each_of_its_ranks(seed):
    rng = np.random.default_rng(seed)
    parts = draw(rng, 3, 9, 4, 10, 9)
    counts = counts_of(parts, 9)
    layout = lay_out(counts, plan(counts).alloc)
    for source, ids in enumerate(parts):
        m = map_tokens(ids, layout, source)
        token = torch.arange(ids.numel()) // 4
        real = m.rank >= 0
        assert (real == (ids.reshape(-1) >= 0)).all()
        assert (token[m.first] == token).all()
        assert (m.rank[m.first] == m.rank).all()
        pairs = set(zip(token[real].tolist(), m.rank[real].tolist(), strict=True))
        assert int(m.travels.sum()) == len(pairs)
        alone = map_tokens(ids, layout, source, share_copies=False)
        assert (alone.travels == real).all()


def test_an_experts_tokens_are_cut_in_order_of_source_and_position():
    parts = [torch.tensor([[0], [0], [0]]), torch.tensor([[0], [1], [0]])]
    counts = counts_of(parts, 2)
    layout = lay_out(counts, plan(counts).alloc)
    # rank 1 takes two of expert 0's five tokens, after its own expert 1 in its rows
    maps = [map_tokens(p, layout, r) for r, p in enumerate(parts)]
    assert maps[0].rank.tolist() == [0, 0, 0]
    assert maps[0].row.tolist() == [0, 1, 2]
    assert maps[1].rank.tolist() == [1, 1, 1]
    assert maps[1].row.tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("ranks", "pays"), [(1, True), (2, True), (8, True), (32, True), (64, True), (256, False)]
)
def test_sharing_copies_pays_where_ranks_are_few(ranks, pays):
    assert copies_pay(ranks, 16) is pays
