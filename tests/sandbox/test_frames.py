"""Frames survive any cutting of the byte stream; nonsense is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.sandbox import frames

frame = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 7), st.binary(max_size=300))


@given(st.lists(frame, max_size=20), st.lists(st.integers(1, 50), min_size=1))
def test_any_cut_gives_the_same_frames(sent, cuts):
    raw = b"".join(frames.pack(*item) for item in sent)
    decoder, got, at, turn = frames.Decoder(), [], 0, 0
    while at < len(raw):
        size = cuts[turn % len(cuts)]
        got += decoder.feed(raw[at : at + size])
        at, turn = at + size, turn + 1
    assert got == sent


@pytest.mark.parametrize("raw", [b"\xff" * 9, b"GET / HTTP/1.1\r\n", frames.pack(1, 200)])
def test_nonsense_is_refused(raw):
    with pytest.raises(frames.FrameError):
        frames.Decoder().feed(raw)
