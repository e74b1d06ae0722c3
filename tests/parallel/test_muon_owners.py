"""Ownership in distributed Muon: every block has one place, and the work is shared out evenly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.config import preset
from openk3.parallel.layout import row_spans
from openk3.parallel.muon_owners import Rows, assign_owners, buckets_of


@st.composite
def matrices(draw):
    blocks = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
    rows = sum(blocks) * draw(st.integers(1, 6))
    return rows, blocks, draw(st.integers(1, 8))


@given(st.lists(matrices(), min_size=1, max_size=6), st.integers(1, 6), st.integers(1, 60))
def test_every_row_is_computed_once(shapes, places, limit):
    rows = [Rows(row_spans(n, places), blocks, columns) for n, blocks, columns in shapes]
    units = assign_owners(rows, places)
    for i, one in enumerate(rows):
        at_home = [r for p in range(places) for r in range(*one.home(p))]
        for p in range(places):
            start, stop = one.home(p)
            assert (stop - start) % one.period == 0
            assert start == stop or one.spans[p][0] <= start < stop <= one.spans[p][1]
        travelling = []
        for unit in (u for u in units if u.parameter == i):
            parts = one.parts(unit.period)
            assert len(parts) > 1
            travelling += [r for _, span in parts for r in range(*span)]
        assert sorted(at_home + travelling) == list(range(shapes[i][0]))
    buckets = buckets_of(units, rows, places, limit)
    assert sorted((u for b in buckets for u in b), key=units.index) == units
    for bucket in buckets:
        for owner in range(places):
            sizes = [
                rows[u.parameter].period * rows[u.parameter].columns
                for u in bucket
                if u.owner == owner
            ]
            assert sum(sizes) <= limit or len(sizes) == 1


def matrices_of_k3(places):
    """The attention and dense matrices of K3's layers, sharded over `places`."""
    c = preset("k3")
    d, head = c.hidden_size, c.linear_attn.head_dim
    inner = c.linear_attn.num_heads * head
    kda = [(inner, head, d)] * 4 + [(inner, head, head), (head, head, d), (d, d, inner)]
    wide, latent = c.num_shared_experts * c.moe_intermediate_size, c.routed_expert_hidden_size
    moe = [(wide, wide, d)] * 2 + [(d, d, wide), (latent, latent, d), (d, d, latent)]
    shapes = (kda + moe) * 69 + moe * 24
    return [Rows(row_spans(n, places), (height,), columns) for n, height, columns in shapes]


@pytest.mark.parametrize(("places", "excess"), [(8, 1.01), (64, 1.03)])
def test_owners_of_k3s_matrices_have_equal_work(places, excess):
    rows = matrices_of_k3(places)
    loads = [0] * places
    for one in rows:
        for place in range(places):
            start, stop = one.home(place)
            loads[place] += (stop - start) // one.period * one.cost
    for unit in assign_owners(rows, places):
        loads[unit.owner] += rows[unit.parameter].cost
    assert max(loads) * places / sum(loads) < excess


def test_heads_that_lie_on_one_process_do_not_travel():
    assert assign_owners([Rows(row_spans(96 * 128, 32), (128,), 7168)], 32) == []
    split = assign_owners([Rows(row_spans(96 * 128, 64), (128,), 7168)], 64)
    assert len(split) == 32  # one and a half heads each: every third is shared
