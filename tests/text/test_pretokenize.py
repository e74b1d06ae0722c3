"""Cuts of very long input, against a character-by-character count."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from openk3.text.pretokenize import MAX_PIECE_CHARS, MAX_RUN_CHARS, split_long, well_formed


def split_by_counting(text):
    pieces = []
    for start in range(0, len(text), MAX_PIECE_CHARS):
        chunk, piece, run, was_space = text[start : start + MAX_PIECE_CHARS], [], 0, None
        for char in chunk:
            run = run + 1 if char.isspace() == was_space else 1
            was_space = char.isspace()
            if run > MAX_RUN_CHARS:
                pieces.append("".join(piece))
                piece, run = [], 1
            piece.append(char)
        pieces.append("".join(piece))
    return pieces


lengths = st.sampled_from([1, 2, 12_499, 12_500, 24_999, 25_000, 25_001, 50_000, 50_001, 75_002])
runs = st.tuples(st.sampled_from("a é\n\u3000\x1c"), lengths)


@settings(deadline=None, max_examples=40)
@given(runs=st.lists(runs, max_size=4))
@example(runs=[("a", 1), (" ", 25_001)])
def test_cuts_equal_a_count(runs):
    text = "".join(char * length for char, length in runs)
    assert list(split_long(text)) == split_by_counting(text)


def test_cut_every_400_000_characters():
    text = "word " * 170_000
    pieces = list(split_long(text))
    assert [len(piece) for piece in pieces] == [400_000, 400_000, 50_000]
    assert pieces == split_by_counting(text)
    assert "".join(pieces) == text


def test_surrogates_become_text():
    assert well_formed("a\ud83d\ude42b") == "a🙂b"
    assert well_formed("\ud800x\udfff") == "\ufffdx\ufffd"
    assert well_formed("é🙂") == "é🙂"
