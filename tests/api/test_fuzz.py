"""Bodies that were right until something in them was replaced: answered, and never by a 500."""

import copy
import random
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("httpx", reason="the serve extra is not installed")
pytest.importorskip("xgrammar", reason="the serve extra is not installed")
pytest.importorskip("PIL", reason="the vision extra is not installed")

from openai_server import serving
from openk3.text.image import ImageProcessor

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAA"
    "AABJRU5ErkJggg=="
)
URL = f"data:image/png;base64,{PNG}"
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "enum": ["x"]},
        "b": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/q"}]},
    },
    "required": ["a"],
    "$defs": {"q": {"type": "boolean"}},
}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CHAT = {
    "model": "tiny-k3",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "system", "content": "",
         "tools": [{"type": "function", "function": {"name": "g", "parameters": SCHEMA}}]},
        {"role": "user", "content": [{"type": "text", "text": "hi"},
                                     {"type": "image_url", "image_url": {"url": URL}}]},
        {"role": "assistant", "content": "x", "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "t"},
        {"role": "assistant", "content": "be", "partial": True},
    ],
    "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema",
                        "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}},
    "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["a"], "seed": 3, "logprobs": True,
    "top_logprobs": 2, "logit_bias": {"3": 1}, "max_tokens": 3,
    "thinking": {"type": "enabled", "effort": "low", "keep": "all"},
    "stream_options": {"include_usage": True},
}  # fmt: skip
MESSAGES = {
    "model": "tiny-k3", "max_tokens": 3, "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "hi"},
            {"type": "image",
             "source": {"type": "base64", "media_type": "image/png", "data": PNG}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": ""},
            {"type": "text", "text": "x"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1",
             "content": [{"type": "text", "text": "r"}]},
            {"type": "text", "text": "go"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f"}, "stop_sequences": ["a"],
    "thinking": {"type": "enabled", "budget_tokens": 5}, "output_config": {"effort": "low"},
}  # fmt: skip
RESPONSES = {
    "model": "tiny-k3",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"},
                                     {"type": "input_image", "image_url": URL}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "o"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c",
         "output": [{"type": "input_text", "text": "o"}]},
    ],
    "tools": [{"type": "function", **FUNCTION}], "tool_choice": {"type": "function", "name": "f"},
    "reasoning": {"effort": "low"}, "max_output_tokens": 3,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
}  # fmt: skip
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES,
    "/v1/completions": {"prompt": [[1, 2], [3]], "max_tokens": 2, "echo": True, "n": 2},
    "/tokenize": {"messages": CHAT["messages"][:1], "tools": [TOOL]},
    "/detokenize": {"tokens": [1, 2, 3]},
}
VALUES = [None, True, False, 0, 1, -1, 1.5, 1e308, 10**30, "", "x", "none", "auto", "\0",
          "<|open|>", [], {}, [None], ["x"], [[]], {"type": "x"}, {"a": {"b": [1]}},
          [1, "x"], {"url": 5}, {"$ref": "#"}, "(a+)+$"]  # fmt: skip


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items if isinstance(value, (dict, list)) else ():
        yield from (
            places(inner, (*path, key)) if isinstance(inner, (dict, list)) else [(*path, key)]
        )


def changed(body: dict, rng: random.Random) -> dict:
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 2])):
        *way, last = rng.choice(list(places(body)) or [("x",)])
        inner = body
        for key in way:
            inner = inner[key]
        if isinstance(inner, dict) and rng.random() < 0.25:
            inner.pop(last, None)
        else:
            inner[last] = copy.deepcopy(rng.choice(VALUES))
    return body


@pytest.fixture(scope="module")
def server():
    with serving("ok⟨E⟩", processor=ImageProcessor(patch_size=4)) as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_every_body_gets_an_answer(server, path):
    assert server.post(path, BODIES[path]).status_code == 200
    rng = random.Random(path)
    seen = set()
    for _ in range(150):
        body = changed(BODIES[path], rng)
        answer = server.post(path, body)
        assert answer.status_code < 500, body
        seen.add(answer.status_code)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]
    assert 400 in seen
    server.settle()
    assert server.engine.running == {}
