"""Output is kept within bounds: its head, its tail, and how much fell between."""

from hypothesis import given
from hypothesis import strategies as st

from openk3.sandbox.process import Collector


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(2, 60))
def test_reported_head_and_tail_survive_and_the_loss_is_counted(pieces, limit):
    collector, whole = Collector(limit), b"".join(pieces)
    for piece in pieces:
        collector.add(piece)
    half = limit // 2
    kept = collector.value()
    if not collector.dropped:
        assert kept == whole
        return
    assert len(whole) == 2 * half + collector.dropped
    assert kept.startswith(whole[:half])
    assert kept.endswith(whole[-half:])
    assert f"[... {collector.dropped} bytes dropped ...]".encode() in kept
