"""Stop strings and whole characters, whatever pieces the text comes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.engine.chat import ChatReader
from openk3.engine.text_stream import StopStrings, TextReader
from openk3.errors import InputError
from scripted_engine import tokenizer


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    stop = StopStrings(stops)
    return "".join(map(stop.feed, pieces)) + stop.finish(), stop.found


def test_a25_a_stop_split_over_pieces_is_seen_and_never_sent():
    words = ["alpha", " beta", " gamma", " delta"]
    assert run(words, ["beta gamma"]) == ("alpha ", "beta gamma")
    assert run(["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"]) == ("ABC", "DEFGHIJ")


def test_what_merely_begins_a_stop_is_held_back_exactly_and_then_released():
    stop = StopStrings(["aab"])
    assert [stop.feed(c) for c in "xaaac"] == ["x", "", "", "a", "aac"]
    assert stop.feed("aa") == ""
    assert stop.finish() == "aa"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
       st.data())  # fmt: skip
def test_pieces_do_not_matter(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    sent, found = run(pieces, stops)
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if not ends:
        assert (sent, found) == (text, None)
        return
    assert found in stops
    assert text[: min(ends)] == sent + found
    assert not any(s in sent for s in stops)


@pytest.mark.parametrize("stops", [[""], ["x" * 257], ["a"] * 17, [3]])
def test_stops_that_cannot_be_are_refused(stops):
    with pytest.raises(InputError, match="stop"):
        StopStrings(stops)


@pytest.mark.parametrize("text", ["🙂", "🦙 und 𠮷", "e\u0301"])
def test_a24_no_half_characters(text):
    ids = tokenizer().encode(text)
    assert len(ids) >= 3, "these characters are several tokens here"
    reader = TextReader(tokenizer())
    pieces = [delta.text for i in ids for delta in reader.feed([i])]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert reader.finish() == []
    for cut in range(len(ids)):  # the text ends inside a character: as a whole decode would say it
        whole, single = TextReader(tokenizer()), TextReader(tokenizer())
        once = whole.feed(ids[:cut]) + whole.finish()
        parts = [d for i in ids[:cut] for d in single.feed([i])] + single.finish()
        assert "".join(d.text for d in once) == "".join(d.text for d in parts)
        assert "".join(d.text for d in parts) == tokenizer().decode(ids[:cut])


@pytest.mark.parametrize("beyond", [tokenizer().vocab_size, 10**6])
def test_an_id_that_no_vocabulary_has_says_nothing(beyond):
    """A model has more rows than ids where they were filled up to a round number."""
    ids = [*tokenizer().encode("fi"), beyond, *tokenizer().encode("ne")]
    for reader in (TextReader(tokenizer(), ["x"]), ChatReader(tokenizer(), thinking=False)):
        deltas = [*reader.feed(ids), *reader.finish()]
        assert "".join(delta.text for delta in deltas if delta.kind == "content") == "fine"
