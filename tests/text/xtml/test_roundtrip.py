"""Properties: render -> parse -> render is the identity, and no cut changes the message."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.text import xtml
from openk3.text.special_tokens import K3_NAMES

MARKUP = [*K3_NAMES, "<|op", "think", "tools", "message", 'call tool="', "&amp;", '"', "\n", " "]
wild_text = st.lists(st.sampled_from(MARKUP) | st.text(max_size=8), max_size=6).map("".join)
plain_text = st.text(max_size=30).filter(lambda text: "<" not in text)


def json_values(text):
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    leaves = st.none() | st.booleans() | numbers | text
    return st.recursive(
        leaves,
        lambda v: st.lists(v, max_size=3) | st.dictionaries(text, v, max_size=3),
        max_leaves=6,
    )


def assistants(text, names):
    arguments = st.dictionaries(text, json_values(text), max_size=3)
    function = st.fixed_dictionaries(
        {"name": names, "arguments": arguments | st.just("{not json") | st.just("")}
    )
    call = st.fixed_dictionaries({"function": function})
    return st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": text},
        optional={
            "name": names,
            "reasoning_content": text.filter(lambda t: t.strip() or not t),
            "tool_calls": st.lists(call, max_size=3),
        },
    )


def others(text, names):
    said = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system"]), "content": text}, optional={"name": names}
    )
    result = st.fixed_dictionaries({"role": st.just("tool"), "tool": names, "content": text})
    return said | result


def messages(text):
    names = text.filter(bool)
    return assistants(text, names) | others(text, names)


@settings(deadline=None, max_examples=300)
@given(message=messages(wild_text), thinking=st.booleans())
def test_ids_there_and_back(small, message, thinking):
    """With ids, whatever the text spells."""
    segments = xtml.render([message], thinking=thinking, add_generation_prompt=False)
    ids = small.encode_segments(segments)
    again = xtml.parse(ids, tokenizer=small)
    assert again["role"] == message["role"]
    assert again["content"] == message["content"]
    assert xtml.render([again], thinking=thinking, add_generation_prompt=False) == segments


@settings(deadline=None, max_examples=200)
@given(message=messages(plain_text), thinking=st.booleans())
def test_text_there_and_back(message, thinking):
    """With text, unless a body spells markup."""
    segments = xtml.render([message], thinking=thinking, add_generation_prompt=False)
    again = xtml.parse("".join(text for text, _ in segments))
    assert xtml.render([again], thinking=thinking, add_generation_prompt=False) == segments


tags = st.sampled_from(["think", "response", "tools", "message", "call", "argument", "json"])
attributes = st.sampled_from(
    [
        "",
        ' tool="t"',
        ' key="k"',
        ' key="k" type="number"',
        ' role="assistant"',
        ' tool="t" index="1"',
        " x",
    ]
)
opening = st.builds("<|open|>{}{}<|sep|>".format, tags, attributes)
closing = st.builds("<|close|>{}{}".format, tags, st.sampled_from(["<|sep|>", "", " ", "<|se"]))
noise = st.sampled_from(
    ["<|open|>", "<|close|>", "<|sep|>", "<", "1", " ", "\n", "é🙂", "word", "th"]
)
outputs = st.lists(opening | closing | noise, max_size=14).map("".join)


@settings(deadline=None, max_examples=400)
@given(output=outputs, thinking=st.booleans(), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_any_cut_of_any_output_gives_the_same_message(small, output, thinking, cuts):
    """Well-formed or not, text or bytes or ids, the pieces do not matter."""
    data, ids = output.encode(), small.encode(output, allow_special=True)
    for source, tokenizer in ((data, None), (ids, small), (output, None)):
        parser = xtml.StreamParser(tokenizer, thinking=thinking)
        total = xtml.Accumulator()
        edges = [0, *sorted(cut for cut in cuts if cut < len(source)), len(source)]
        for start, stop in pairwise(edges):
            for delta in parser.feed(source[start:stop]):
                total.add(delta)
        for delta in parser.finish():
            total.add(delta)
        assert total.message() == xtml.parse(source, tokenizer=tokenizer, thinking=thinking)


@settings(deadline=None, max_examples=200)
@given(
    output=outputs, words=st.lists(st.integers(0, 999).map("w{}w".format), min_size=1, max_size=5)
)
def test_no_word_is_ever_lost(output, words):
    """Words strewn between arbitrary markup all arrive somewhere, in order within a channel."""
    pieces = [
        output[i * len(output) // len(words) :][: len(output) // len(words)]
        for i in range(len(words))
    ]
    text = "".join(f"{piece}<|sep|> {word} " for piece, word in zip(pieces, words, strict=True))
    parser = xtml.StreamParser()
    for character in text:
        parser.feed(character)
        if parser.done:
            return
    parser.finish()
    everything = repr(parser.message)
    for word in words:
        assert word in everything
