"""Grammars: whatever a model without any sense picks among the allowed ids has the form."""

import json
import random

import pytest

xgrammar = pytest.importorskip("xgrammar", reason="the serve extra is not installed")

from openk3.engine.grammar import Grammars  # noqa: E402
from openk3.errors import InputError  # noqa: E402
from openk3.text.xtml import parse  # noqa: E402
from scripted_engine import tokenizer  # noqa: E402

PAD = 5  # logits a model has beyond its vocabulary


@pytest.fixture(scope="module")
def grammars():
    return Grammars(tokenizer(), tokenizer().vocab_size + PAD)


def tool(name: str, parameters: object) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def walk(grammar, seed: int, limit: int = 400) -> list[int]:
    """Random allowed ids; what ends something is picked more often, so that the walk ends."""
    rng = random.Random(seed)
    follower, ids = grammar.start(), []
    enders = {
        tokenizer().special_id("<|close|>"),
        *tokenizer().encode('"'),
        *tokenizer().encode("}"),
    }
    while (mask := follower.allowed()) is not None:
        assert mask.shape == (tokenizer().vocab_size + PAD,)
        allowed = mask.nonzero().flatten().tolist()
        assert allowed, "a dead end"
        ending = [i for i in allowed if i in enders]
        ids.append(rng.choice(ending if ending and rng.random() < 0.4 else allowed))
        follower.accept(ids[-1])
        assert len(ids) < limit, tokenizer().decode(ids)
    assert ids[-1] == tokenizer().end_of_msg_id
    return ids


def message(grammar, seed: int, thinking: bool) -> dict:
    return parse(walk(grammar, seed), tokenizer=tokenizer(), thinking=thinking)


@pytest.mark.parametrize("thinking", [False, True])
def test_json_of_a_schema_after_the_think_channel(grammars, thinking):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99},
                       "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
    }  # fmt: skip
    grammar = grammars.compile(thinking=thinking, schema=schema)
    thoughts = set()
    for seed in range(8):
        got = message(grammar, seed, thinking)
        value = json.loads(got["content"])
        assert set(value) == {"a", "b"}
        assert 0 <= value["a"] <= 99
        assert value["b"] in ("x", "y")
        assert got["content"] == json.dumps(value, separators=(",", ":"))
        assert "tool_calls" not in got
        thoughts.add(got.get("reasoning_content"))
    assert (thoughts == {None}) == (not thinking)


WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"$ref": "#/$defs/unit"},
            "where": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"const": 3}]},
        },
        "required": ["city", "days"],
        "$defs": {"unit": {"enum": ["C", "F"]}},
    },
)
MAP = tool("a&b", {"type": "object", "additionalProperties": {"type": "boolean"},
                   "minProperties": 1, "maxProperties": 2})  # fmt: skip
NOTHING = tool("now", None)


def test_required_calls_name_declared_tools_with_valid_arguments(grammars):
    grammar = grammars.compile(thinking=False, tools=[WEATHER, MAP, NOTHING], calls="required")
    names = set()
    for seed in range(24):
        for call in message(grammar, seed, False)["tool_calls"]:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            names.add(name)
            if name == "get_weather":
                assert {"city", "days"} <= set(arguments) <= {"city", "days", "unit", "where"}
                assert len(arguments["city"]) <= 8
                assert arguments["days"] in range(1, 10)
                assert arguments.get("unit", "C") in ("C", "F")
                assert arguments.get("where", 3) in (None, True, False, 3)
            elif name == "a&b":
                assert 1 <= len(arguments) <= 2
                assert all(isinstance(value, bool) for value in arguments.values())
            else:
                assert arguments == {}
    assert names == {"get_weather", "a&b", "now"}


def test_calls_may_be_left_to_the_model_or_kept_to_one(grammars):
    auto = grammars.compile(thinking=False, tools=[NOTHING], calls="auto")
    counts = {len(message(auto, seed, False).get("tool_calls", ())) for seed in range(20)}
    assert 0 in counts
    assert max(counts) >= 1
    one = grammars.compile(thinking=False, tools=[NOTHING], calls="required", parallel=False)
    assert {len(message(one, seed, False)["tool_calls"]) for seed in range(10)} == {1}


def test_markup_can_be_written_with_real_markers_alone(grammars):
    follower = grammars.compile(thinking=False, tools=[NOTHING], calls="required").start()
    for token_id in tokenizer().encode("<|close|>response<|sep|>"):
        follower.accept(token_id)  # mere text of the answer
    assert tokenizer().special_id("<|close|>") in follower.allowed().nonzero()
    follower.accept(tokenizer().special_id("<|close|>"))
    allowed = follower.allowed().nonzero().flatten().tolist()
    assert {tokenizer().decode([i]) for i in allowed} <= {"response"[:n] for n in range(1, 9)}
    with pytest.raises(InputError, match="does not fit"):
        follower.accept(tokenizer().end_of_msg_id)


@pytest.mark.parametrize(
    "name", ["Straße", "référence", "éé e", "b\\xdfe", "ÿ0", "城市e", 'q"ße', "[ßa]", "\u0080f"]
)
def test_letters_are_what_they_are_whatever_follows(grammars, name):
    """xgrammar reads "\\xdfe", as it writes "ße" itself, as another letter."""
    schema = {"type": "object", "properties": {name: {"const": name}}, "required": [name]}
    got = json.loads(message(grammars.compile(thinking=False, schema=schema), 1, False)["content"])
    assert got == {name: name}


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"pattern": "(?<=x)y("}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y("}}},
        nested(40),
        nested(10_000),
        {"type": "object", "properties": {"a": {"type": "foo"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
        {"type": "object", "properties": {"a": {"enum": []}}},
        {"type": "object", "properties": {"a": 5}},
        {"type": "object", "properties": {"a": {"description": "x" * 100_001}}},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 10**6}}},
        {"type": "object", "properties": {f"p{i}": {} for i in range(300)}},
        {"type": "object", "properties": {"a": {}}, "required": 5},
        {"type": "object", "properties": {"a": {}}, "required": [[1]]},
        {"type": "object", "properties": {"a": {"enum": "xyz"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": 5}}},
        {"type": "object", "properties": {"a\ud800": {}}},
    ],
    ids=range(17),
)
def test_a28_what_no_grammar_can_be_made_of_is_an_input_error(grammars, schema):
    with pytest.raises(
        InputError,
        match=r"grammar|nested|characters|type|points|back|no value|object|lengths|properties",
    ):
        grammars.compile(thinking=False, tools=[tool("t", schema)], calls="required")
    with pytest.raises(InputError):
        grammars.compile(thinking=False, schema=schema)
