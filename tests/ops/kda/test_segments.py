"""Slots and segments: laws that must hold for any lengths."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from openk3.ops.kda.segments import WHOLE, num_slots, plan_segments


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=30), st.sampled_from([16, 64, 192, WHOLE])
)
def test_slots_of_packed_sequences_never_meet(lengths, unit):
    offsets = [0, *accumulate(lengths)]
    used = []
    for n, length in enumerate(lengths):
        first = offsets[n] // unit + n
        used += range(first, first + max(-(-length // unit), 1))
    assert len(set(used)) == len(used)
    assert max(used) < num_slots(offsets[-1], len(lengths), unit, packed=True)


@given(
    st.integers(1, 1 << 20),
    st.integers(1, 64),
    st.integers(1, 128),
    st.sampled_from([1, 2, 114, 132, 148]),
    st.booleans(),
)
def test_a_plan_covers_every_sequence(tokens, num_seqs, heads, num_sms, packed):
    plan = plan_segments(tokens, num_seqs, heads, num_sms, packed)
    if plan.split:
        assert plan.length % 64 == 0
        assert plan.length < tokens
    assert plan.num_slots == num_slots(tokens, num_seqs, plan.length, packed)


def test_few_heads_are_split_and_many_are_not():
    assert plan_segments(1 << 20, 1, 1, 132, False).split
    assert plan_segments(65536, 1, 12, 132, False).split
    assert not plan_segments(8192, 1, 96, 132, False).split
    assert not plan_segments(8192, 6, 96, 132, True).split
    assert not plan_segments(64, 1, 1, 132, False).split
