"""Malformed outputs read as what was meant, the same whole, in pieces, as text and as ids."""

import json

import numpy as np
import pytest

from openk3.errors import InputError
from openk3.text import xtml
from openk3.text.special_tokens import CLOSE as C
from openk3.text.special_tokens import END_OF_MSG as E
from openk3.text.special_tokens import OPEN as O
from openk3.text.special_tokens import SEP as S

PARIS = f'{O}call tool="get_weather" index="1"{S}{O}argument key="city" type="string"{S}Paris'
CALL = f"{PARIS}{C}argument{S}{C}call{S}"
TOOLS = f"{O}tools{S}{CALL}{C}tools{S}"
MESSAGE_END = f"{C}message{S}{E}"
WEATHER = ("get_weather", '{"city": "Paris"}')


def summary(message):
    """(reasoning, content, [(tool, arguments)...])"""
    calls = [tuple(call["function"].values()) for call in message.get("tool_calls", [])]
    return message.get("reasoning_content", ""), message["content"], calls


def stream(pieces, tokenizer=None, thinking=True):
    """The message that the pieces give, checked against the sum of the deltas."""
    parser = xtml.StreamParser(tokenizer, thinking=thinking)
    total = xtml.Accumulator()
    for piece in pieces:
        for delta in parser.feed(piece):
            total.add(delta)
    for delta in parser.finish():
        total.add(delta)
    assert total.message() == parser.message
    return parser.message


def all_ways(text, tokenizer, thinking=True):
    """The summary of `text`, after checking that every way to feed it gives the same."""
    expected = xtml.parse(text, thinking=thinking)
    data = text.encode()
    ids = tokenizer.encode(text, allow_special=True)
    assert stream(text, thinking=thinking) == expected
    assert stream([data[i : i + 1] for i in range(len(data))], thinking=thinking) == expected
    assert xtml.parse(ids, tokenizer=tokenizer, thinking=thinking) == expected
    assert stream(ids, tokenizer, thinking) == expected
    for cut in range(len(data) + 1):
        assert stream([data[:cut], data[cut:]], thinking=thinking) == expected
    return summary(expected)


THINKING = {
    "proper": (
        f"plan{C}think{S}{O}response{S}Sure.{C}response{S}{TOOLS}{MESSAGE_END}",
        ("plan", "Sure.", [WEATHER]),
    ),
    "think not closed before response": (
        f"plan{O}response{S}Sure.{C}response{S}{MESSAGE_END}",
        ("plan", "Sure.", []),
    ),
    "think not closed before tools": (
        f"plan{O}tools{S}{CALL}{C}tools{S}{MESSAGE_END}",
        ("plan", "", [WEATHER]),
    ),
    "think closed without sep, then a tag": (
        f"plan{C}think{O}response{S}Hi{C}response{S}{MESSAGE_END}",
        ("plan", "Hi", []),
    ),
    "think closed without sep, then text": (
        f"plan{C}think\nHi{C}response{S}{MESSAGE_END}",
        ("plan", "\nHi", []),
    ),
    "think skipped": (f"Hello there{C}response{S}{MESSAGE_END}", ("", "Hello there", [])),
    "think skipped, then tools": (
        f"Hello{C}response{S}{TOOLS}{MESSAGE_END}",
        ("", "Hello", [WEATHER]),
    ),
    "answer closed by the message": (
        f"plan{C}think{S}{O}response{S}Hi{MESSAGE_END}",
        ("plan", "Hi", []),
    ),
    "answer closed by the end token": (f"plan{C}think{S}{O}response{S}Hi{E}", ("plan", "Hi", [])),
    "answer not closed before tools": (
        f"{C}think{S}{O}response{S}Hi{TOOLS}{MESSAGE_END}",
        ("", "Hi", [WEATHER]),
    ),
    "opener repeated": (
        f"{O}think{S}plan{C}think{S}{O}response{S}Hi{C}response{S}{MESSAGE_END}",
        ("plan", "Hi", []),
    ),
    "whole opener repeated": (
        f'{O}message role="assistant"{S}{O}think{S}plan{C}think{S}'
        f"{O}response{S}Hi{C}response{S}{MESSAGE_END}",
        ("plan", "Hi", []),
    ),
    "answer without opener": (f"plan{C}think{S}Hi{C}response{S}{MESSAGE_END}", ("plan", "Hi", [])),
    "layout between elements": (
        f"plan{C}think{S}\n{O}response{S} Hi {C}response{S}\n\n"
        f"{O}tools{S}\n {CALL}\n{C}tools{S}\n{MESSAGE_END}",
        ("plan", " Hi ", [WEATHER]),
    ),
    "text between calls": (
        f"{C}think{S}{O}response{S}A{C}response{S}"
        f"{O}tools{S}{CALL} and {CALL}{C}tools{S}{MESSAGE_END}",
        ("", "A and ", [WEATHER, WEATHER]),
    ),
    "call not closed": (
        f"p{O}tools{S}{PARIS}{C}call{S}{C}tools{S}{MESSAGE_END}",
        ("p", "", [WEATHER]),
    ),
    "nothing of the call closed": (f"p{O}tools{S}{PARIS}{MESSAGE_END}", ("p", "", [WEATHER])),
    "unknown tag": (
        f"p{C}think{S}{O}response{S}a{O}foo{S}b{C}foo{S}{S}{C}{O}c{C}response{S}{MESSAGE_END}",
        ("p", f"a{O}foo{S}b{C}foo{S}{S}{C}{O}c", []),
    ),
    "call without a name": (
        f'p{O}tools{S}{O}call index="1"{S}{C}call{S}{C}tools{S}{MESSAGE_END}',
        ("p", f'{O}call index="1"{S}{C}call{S}', []),
    ),
    "after the end": (
        f"p{C}think{S}{O}response{S}a{C}response{S}{MESSAGE_END}more{E}",
        ("p", "a", []),
    ),
    "nothing": ("", ("", "", [])),
    "a lone less-than": ("1 < 2 <| 3 <|op <", ("1 < 2 <| 3 <|op <", "", [])),
    "emoji and Han": (
        f"🙂思考{C}think{S}{O}response{S}🦙 𠮷{C}response{S}{MESSAGE_END}",
        ("🙂思考", "🦙 𠮷", []),
    ),
}


@pytest.mark.parametrize("name", THINKING)
def test_thinking(name, small):
    text, expected = THINKING[name]
    assert all_ways(text, small) == expected


ANSWERING = {
    "closed by the message": (f"Hello{MESSAGE_END}", ("", "Hello", [])),
    "proper": (f"Hello{C}response{S}{TOOLS}{MESSAGE_END}", ("", "Hello", [WEATHER])),
    "empty think first": (
        f"{C}think{S}{O}response{S}Hi{C}response{S}{MESSAGE_END}",
        ("", "Hi", []),
    ),
    "opener repeated": (f"{O}response{S}Hi{C}response{S}{MESSAGE_END}", ("", "Hi", [])),
    "thinks all the same": (
        f"{O}think{S}plan{C}think{S}{O}response{S}Hi{C}response{S}{MESSAGE_END}",
        ("plan", "Hi", []),
    ),
}


@pytest.mark.parametrize("name", ANSWERING)
def test_not_thinking(name, small):
    text, expected = ANSWERING[name]
    assert all_ways(text, small, thinking=False) == expected


@pytest.mark.parametrize(
    ("spelled", "expected"),
    [
        (f"{O}think{S}plan", ("plan", "", [])),
        (f'{O}message role="assistant"{S}{O}think{S}plan', ("plan", "", [])),
        (f"{O}response{S}Hi", ("", "Hi", [])),
        (f"{O}thinking", (f"{O}thinking", "", [])),
        (f"plan {O}response{S}", (f"plan {O}response{S}", "", [])),
    ],
)
def test_opener_spelled_in_ordinary_tokens(spelled, expected, small):
    ids = small.encode(spelled)
    assert not any(small.is_special(i) for i in ids)
    assert summary(xtml.parse(ids, tokenizer=small)) == expected
    assert summary(stream(ids, small)) == expected


def test_ids_tell_spelled_markup_from_structure(small):
    """A body may quote closing tags: in ids they are ordinary tokens."""
    quoted = f"close with {C}argument{S}{C}response{S}{C}message{S}{E} like this"
    before = (
        f'{C}think{S}{O}response{S}{quoted}{C}response{S}{O}tools{S}{O}call tool="t" index="1"{S}'
    )
    message = {
        "role": "assistant",
        "content": quoted,
        "reasoning_content": quoted,
        "tool_calls": [{"function": {"name": "t", "arguments": {"x": quoted}}}],
    }
    ids = small.encode_segments(xtml.render([message], add_generation_prompt=False))
    assert small.decode(ids).count(before) == 1
    reasoning, content, calls = summary(stream(ids, small))
    assert (reasoning, content) == (quoted, quoted)
    assert json.loads(calls[0][1]) == {"x": quoted}


def test_no_delta_shows_markup(small):
    text = THINKING["proper"][0]
    for pieces in (text, small.encode(text, allow_special=True)):
        parser = xtml.StreamParser(small)
        deltas = [delta for piece in pieces for delta in parser.feed(piece)]
        assert parser.done
        assert not any("<" in delta.text for delta in deltas)
        kinds = list(dict.fromkeys(delta.kind for delta in deltas))
        assert kinds == ["reasoning", "content", "call", "arguments"]


@pytest.mark.parametrize("skip_special", [False, True])
def test_through_the_detokeniser(small, skip_special):
    text, expected = THINKING["think not closed before tools"]
    ids = small.encode(text, allow_special=True)
    assert summary(xtml.parse(small.decode(ids, skip_special=skip_special))) == expected


def test_cut_anywhere_streams_a_prefix(small):
    """Whatever is cut off, the deltas are a prefix of the whole's, and no markup leaks."""
    ids = small.encode(THINKING["proper"][0], allow_special=True)
    whole = summary(xtml.parse(ids, tokenizer=small))
    for cut in range(len(ids)):
        parser = xtml.StreamParser(small)
        parser.feed(ids[:cut])
        assert not parser.done or cut == len(ids) - 1
        parser.finish()
        reasoning, content, calls = summary(parser.message)
        assert whole[0].startswith(reasoning)
        assert whole[1].startswith(content)
        assert all(whole[2][i][1].startswith(text) for i, (_, text) in enumerate(calls))
        assert "<|" not in json.dumps(parser.message)


def value(kind, written):
    opener = f'{O}argument key="a&quot;&amp;lt;" type="{kind}"{S}'
    before = f'{O}tools{S}{O}call tool="t" index="1"{S}'
    message = xtml.parse(
        f"{before}{opener}{written}{C}argument{S}{C}call{S}{C}tools{S}{MESSAGE_END}"
    )
    return message["tool_calls"][0]["function"]["arguments"].removeprefix('{"a\\"&lt;": ')[:-1]


@pytest.mark.parametrize(
    ("kind", "written", "expected"),
    [
        ("string", ' a\n"b" &amp; \\ ', '" a\\n\\"b\\" &amp; \\\\ "'),
        ("string", "3", '"3"'),
        ("string", "", '""'),
        ("number", "1e2", "1e2"),
        ("number", "123456789012345678901234567890", "123456789012345678901234567890"),
        ("number", "0.10", "0.10"),
        ("number", "twelve", '"twelve"'),
        ("number", "NaN", '"NaN"'),
        ("number", "", '""'),
        ("boolean", "true", "true"),
        ("boolean", "True", '"True"'),
        ("null", "null", "null"),
        ("object", '{"b": [1, 2.5]}', '{"b": [1, 2.5]}'),
        ("object", '{"b": ', '"{\\"b\\": "'),
        ("integer", "7", "7"),
        ("array", "[" * 20_000, '"' + "[" * 20_000 + '"'),
        ("number", "1" * 5000, '"' + "1" * 5000 + '"'),
    ],
)
def test_typed_values(kind, written, expected):
    assert value(kind, written) == expected


def test_a_call_in_the_json_form_keeps_its_text(small):
    raw = "{not json"
    before = f'{O}tools{S}{O}call tool="t" index="1"{S}{O}json type="object"{S}'
    text = f"{before}{raw}{C}json{S}{C}call{S}{C}tools{S}"
    assert all_ways(text, small) == ("", "", [("t", raw)])


def test_other_roles_and_names(small):
    messages = [
        {"role": "user", "name": 'A "q" & <b>', "content": "  hi\n"},
        {"role": "system", "content": ""},
        {"role": "tool", "tool": "t", "content": "42"},
        {"role": "assistant", "name": "k", "content": "x"},
    ]
    for message in messages:
        segments = xtml.render([message], add_generation_prompt=False)
        assert xtml.parse(small.encode_segments(segments), tokenizer=small) == message
        assert xtml.parse("".join(text for text, _ in segments)) == message


def test_long_output_takes_linear_time():
    parser = xtml.StreamParser()
    for _ in range(100_000):
        parser.feed("word ")
    parser.feed(f"{C}response{S}")
    assert len(parser.message["content"]) == 500_000


def test_ids_of_other_libraries(small):
    text, expected = THINKING["proper"]
    ids = np.array(small.encode(text, allow_special=True))
    assert summary(xtml.parse(ids, tokenizer=small)) == expected
    assert summary(stream(ids, small)) == expected


def test_ids_without_a_tokenizer_or_out_of_range(small):
    with pytest.raises(InputError, match=r"StreamParser\(tokenizer\)"):
        xtml.parse([1, 2])
    with pytest.raises(InputError, match="token id 99999"):
        xtml.parse([99999], tokenizer=small)
