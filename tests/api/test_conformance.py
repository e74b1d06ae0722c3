"""Arguments of forced calls, and answers of a form, fit their schemas: over HTTP, whole and
streamed, from a model of random weights that knows nothing of either."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("httpx", reason="the serve extra is not installed")
pytest.importorskip("xgrammar", reason="the serve extra is not installed")

from openai_server import joined, serving
from openk3.config import preset
from openk3.engine import Engine, EngineConfig
from openk3.model import K3
from scripted_engine import tokenizer

SHORT = {"type": "string", "maxLength": 6}
FEW = {"type": "integer", "minimum": 0, "maximum": 99}


def thing(*required, **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


SCHEMAS = {
    "one string": thing("a", a=SHORT),
    "nothing": {"type": "object", "properties": {}},
    "all optional": thing(a=SHORT, b=FEW),
    "integer range": thing("a", a={"type": "integer", "minimum": -3, "maximum": 12}),
    "number": thing("a", a={"type": "number", "minimum": 0, "maximum": 1}),
    "boolean": thing("a", a={"type": "boolean"}),
    "null": thing("a", a={"type": "null"}),
    "enum of strings": thing("a", a={"enum": ["red", "dark green", "q\"uote"]}),
    "enum of kinds": thing("a", a={"enum": [1, "1", None, True]}),
    "const": thing("a", a={"const": "fixed"}),
    "several types": thing("a", a={"type": ["boolean", "null"]}),
    "lengths": thing("a", a={"type": "string", "minLength": 2, "maxLength": 4}),
    "pattern": thing("a", a={"type": "string", "pattern": "^[a-c]{2}-[0-9]$"}),
    "array": thing("a", a={"type": "array", "items": FEW, "minItems": 1, "maxItems": 3}),
    "array of objects": thing("a", a={"type": "array", "items": thing("b", b=FEW), "minItems": 1,
                                      "maxItems": 2}),
    "tuple": thing("a", a={"type": "array", "prefixItems": [FEW, {"type": "boolean"}],
                           "items": False, "minItems": 2, "maxItems": 2}),
    "nested": thing("a", a=thing("b", b=thing("c", c=FEW))),
    "any of": thing("a", a={"anyOf": [FEW, {"type": "null"}, thing("b", b={"type": "boolean"})]}),
    "one of": thing("a", a={"oneOf": [{"const": "x"}, {"const": 7}]}),
    "references": {**thing("a", "b", a={"$ref": "#/$defs/t"}, b={"$ref": "#/$defs/t"}),
                   "$defs": {"t": thing("c", c=FEW)}},
    "a tree": {**thing("a", a={"$ref": "#/$defs/n"}),
               "$defs": {"n": thing("v", v=FEW, left={"anyOf": [{"$ref": "#/$defs/n"},
                                                                {"type": "null"}]})}},
    "map": {"type": "object", "additionalProperties": FEW, "minProperties": 1, "maxProperties": 2},
    "names that need escapes": thing("a b", "c\"d", **{"a b": FEW, "c\"d": {"type": "boolean"}}),
    "other scripts": thing("Straße", "城市", Straße=FEW, 城市={"enum": ["東京", "Zürich"]}),
    "defaults and titles": thing("a", a={**FEW, "title": "A", "default": 5, "description": "n"}),
}  # fmt: skip
KINDS = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
    "integer": int, "number": (int, float),
}  # fmt: skip


def is_of(value, kind: str) -> bool:
    return isinstance(value, KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))


def fits(value, schema, root) -> bool:
    """Whether a value is of a schema of the kinds above."""
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return any(fits(value, one, root) for one in schema[word])
    same = [x for x in schema.get("enum", [schema.get("const")]) if x == value]
    if ("enum" in schema or "const" in schema) and not any(type(x) is type(value) for x in same):
        return False
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(is_of(value, kind) for kind in kinds):
        return False
    if isinstance(value, dict):
        known = schema.get("properties", {})
        rest = schema.get("additionalProperties", False)
        return (
            set(schema.get("required", ())) <= value.keys()
            and schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", 99)
            and all(
                fits(v, known[k], root) if k in known else bool(rest) and fits(v, rest, root)
                for k, v in value.items()
            )
        )
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        rules = [*first, *[schema.get("items")] * (len(value) - len(first))]
        pairs = zip(value, rules, strict=True)
        return schema["minItems"] <= len(value) <= schema["maxItems"] and all(
            fits(v, rule, root) for v, rule in pairs
        )
    if isinstance(value, str):
        sized = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99)
        return sized and re.search(schema.get("pattern", ""), value) is not None
    low, high = schema.get("minimum", -1e9), schema.get("maximum", 1e9)
    return not isinstance(value, (int, float)) or low <= value <= high


@pytest.fixture(scope="module")
def server():
    vocab_size = tokenizer().vocab_size
    sizes = {"hash_block": 16, "page_tokens": 64, "num_pages": 900}
    special = {"bos": "[BOS]", "eos": "<|end_of_msg|>", "pad": "[PAD]",
               "media_placeholder": "<|media_pad|>"}  # fmt: skip
    ids = {f"{k}_token_id": tokenizer().special_id(name) for k, name in special.items()}
    model = K3(preset("nano", vocab_size=vocab_size, **ids)).eval()
    engine = Engine(model, EngineConfig(**sizes))
    with serving(engine=engine, vocab_size=vocab_size) as made:
        yield made


def sooner() -> dict[str, float]:
    """A bias to what ends something, or a model without any sense goes on for long."""
    ids = [tokenizer().special_id("<|close|>"), *tokenizer().encode('"'), *tokenizer().encode("}")]
    return {str(token): 9.0 for token in ids}


def ask(server, stream: bool, **fields) -> dict:
    body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 600, "seed": 1,
            "thinking": {"type": "disabled"}, "logit_bias": sooner(), **fields}  # fmt: skip
    if stream:
        return joined(server.stream("/v1/chat/completions", body))
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    return {**choice["message"], "calls": calls, "finish_reason": choice["finish_reason"]}


def every_schema(check) -> None:
    """Each in a thread of its own, as callers come."""
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(check, name, schema) for name, schema in SCHEMAS.items()]:
            done.result()


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_of_forced_calls(server, stream):
    def check(name, schema):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        got = ask(server, stream, tools=tools, tool_choice="required", parallel_tool_calls=False)
        assert got["finish_reason"] == "tool_calls", name
        [call] = got["calls"]
        assert call["name"] == "f"
        arguments = json.loads(call["arguments"])
        assert fits(arguments, schema, schema), (name, arguments)

    every_schema(check)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_a_form(server, stream):
    def check(name, schema):
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        got = ask(server, stream, response_format=form)
        assert got["finish_reason"] == "stop", name
        value = json.loads(got["content"])
        assert fits(value, schema, schema), (name, value)
        assert "\n" not in got["content"]
        assert "\t" not in got["content"]

    every_schema(check)


def test_what_does_not_fit_is_seen():
    for value in ({}, {"a": 5}, {"a": "x", "b": 1}, {"a": "1234567"}, []):
        assert not fits(value, SCHEMAS["one string"], {})
    assert not fits({"a": True}, SCHEMAS["integer range"], {})
    assert not fits({"a": [1, 2]}, SCHEMAS["tuple"], {})
    assert not fits({"a": "ab-x"}, SCHEMAS["pattern"], {})
