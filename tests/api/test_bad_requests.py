"""Malformed requests: each is refused in OpenAI's shape, names its field, and harms no other."""

import base64
import io
import json
import zlib

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("httpx", reason="the serve extra is not installed")
pytest.importorskip("xgrammar", reason="the serve extra is not installed")
PIL_Image = pytest.importorskip("PIL.Image", reason="the vision extra is not installed")

from openai_server import MODEL, serving  # noqa: E402
from openk3.api.openai.prepare import LEAST_OF_A_MESSAGE  # noqa: E402
from openk3.text.image import ImageProcessor  # noqa: E402
from scripted_engine import tokenizer  # noqa: E402

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def tool(**fields) -> dict:
    return {"type": "function", "function": {"name": "f", **fields}}


def chat(**fields) -> tuple[str, dict]:
    return CHAT, {"messages": HI, **fields}


def said(*messages) -> tuple[str, dict]:
    return CHAT, {"messages": list(messages)}


def picture(url: object, kind: str = "image_url") -> tuple[str, dict]:
    part = {"type": kind, kind: {"url": url}}
    return said({"role": "user", "content": [part]})


def bomb() -> str:
    """A small PNG that declares 50,000 x 50,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    size = (50_000).to_bytes(4, "big")
    header = size + size + bytes([8, 2, 0, 0, 0])
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99))
    return data_url(data + chunk(b"IEND", b""))


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def png(width: int, height: int, colour: str = "red") -> str:
    out = io.BytesIO()
    PIL_Image.new("RGB", (width, height), colour).save(out, "PNG")
    return data_url(out.getvalue())


DYNAMIC = {"role": "system", "content": "", "tools": [tool()]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
BAD = {
    "no messages": (CHAT, {}),
    "empty messages": (CHAT, {"messages": []}),
    "messages no list": (CHAT, {"messages": "hi"}),
    "message no object": (CHAT, {"messages": ["hi"]}),
    "no role": said({"content": "hi"}),
    "unknown role": said({"role": "robot", "content": "hi"}),
    "no content": said({"role": "user"}),
    "content number": said({"role": "user", "content": 5}),
    "part unknown": said({"role": "user", "content": [{"type": "audio"}]}),
    "part no object": said({"role": "user", "content": ["x"]}),
    "text no string": said({"role": "user", "content": [{"type": "text", "text": 5}]}),
    "tool without id": said(*HI, {"role": "tool", "content": "x"}),
    "calls no list": said({"role": "assistant", "content": "", "tool_calls": {"a": 1}}),
    "call no object": said({"role": "assistant", "content": "", "tool_calls": ["x"]}),
    "call id": said({"role": "assistant", "content": "", "tool_calls": [
        {"id": [1], **tool(arguments="{}")}]}),
    "call without function": said({"role": "assistant", "content": "", "tool_calls": [{}]}),
    "arguments no object": said({"role": "assistant", "content": "", "tool_calls": [
        tool(arguments="[1]")]}),
    "partial with calls": said(*HI, {"role": "assistant", "content": "x", "partial": True,
                                     "tool_calls": [tool(arguments="{}")]}),
    "temperature text": chat(temperature="0.5"),
    "temperature high": chat(temperature=2.1),
    "temperature negative": chat(temperature=-1),
    "temperature list": chat(temperature=[1]),
    "top_p zero": chat(top_p=0),
    "top_p above 1": chat(top_p=1.5),
    "n zero": chat(n=0),
    "n many": chat(n=129),
    "n bool": chat(n=True),
    "max_tokens zero": chat(max_tokens=0),
    "max_tokens fraction": chat(max_tokens=1.5),
    "max_completion_tokens negative": chat(max_completion_tokens=-5),
    "presence_penalty high": chat(presence_penalty=3),
    "repetition_penalty zero": chat(repetition_penalty=0),
    "stop number": chat(stop=5),
    "stop empty": chat(stop=[""]),
    "stop many": chat(stop=["x"] * 17),
    "stop long": chat(stop="x" * 300),
    "stream text": chat(stream="yes"),
    "include_usage text": chat(stream=True, stream_options={"include_usage": "x"}),
    "seed text": chat(seed="x"),
    "seed huge": chat(seed=2**70),
    "logprobs number": chat(logprobs=3),
    "top_logprobs alone": chat(top_logprobs=3),
    "top_logprobs many": chat(logprobs=True, top_logprobs=21),
    "logit_bias word": chat(logit_bias={"word": 1}),
    "logit_bias id": chat(logit_bias={"999999": 1}),
    "logit_bias negative id": chat(logit_bias={"-1": 1}),
    "logit_bias digits": chat(logit_bias={"²": 1}),
    "logit_bias value": chat(logit_bias={"1": 101}),
    "stop_token_ids": chat(stop_token_ids=[-1]),
    "tools no list": chat(tools={"a": 1}),
    "tool no object": chat(tools=["x"]),
    "tool type": chat(tools=[{"type": "x", "function": {"name": "f"}}]),
    "tool no function": chat(tools=[{"type": "function"}]),
    "tool no name": chat(tools=[{"type": "function", "function": {}}]),
    "tool name digit": chat(tools=[tool(name="1f")]),
    "tool name at": chat(tools=[tool(name="f@")]),
    "tool name long": chat(tools=[tool(name="f" * 257)]),
    "tool twice": chat(tools=[tool(), tool()]),
    "tool parameters": chat(tools=[tool(parameters=[1])]),
    "tool_choice word": chat(tools=[tool()], tool_choice="maybe"),
    "tool_choice required alone": chat(tool_choice="required"),
    "tool_choice required empty": chat(tools=[], tool_choice="required"),
    "tool_choice unknown": chat(tools=[tool()], tool_choice={
        "type": "function", "function": {"name": "g"}}),
    "tool_choice odd": chat(tools=[tool()], tool_choice={"type": "x"}),
    "dynamic tools of user": said({**DYNAMIC, "role": "user"}),
    "dynamic tools with content": said({**DYNAMIC, "content": "x"}),
    "dynamic tools no list": said({**DYNAMIC, "tools": {}}),
    "dynamic tools twice": said({**DYNAMIC, "tools": [tool(), tool()]}),
    "dynamic tools across": said(DYNAMIC, DYNAMIC),
    "dynamic and global": (CHAT, {"messages": [DYNAMIC], "tools": [tool()]}),
    "dynamic item": said({**DYNAMIC, "tools": ["x"]}),
    "format unknown": chat(response_format={"type": "xml"}),
    "format no type": chat(response_format={}),
    "format no schema object": chat(response_format={"type": "json_schema"}),
    "format no name": chat(response_format={**SCHEMA, "json_schema": {"schema": {}}}),
    "format no schema": chat(response_format={**SCHEMA, "json_schema": {"name": "s"}}),
    "format schema text": chat(response_format={
        **SCHEMA, "json_schema": {"name": "s", "schema": "x"}}),
    "format strict": chat(response_format={
        **SCHEMA, "json_schema": {**SCHEMA["json_schema"], "strict": "yes"}}),
    "format schema bad": chat(response_format={
        **SCHEMA, "json_schema": {"name": "s", "schema": {"type": "foo"}}}),
    "effort number": chat(reasoning_effort=1.5),
    "effort word": chat(reasoning_effort="extreme"),
    "thinking type": chat(thinking={"type": "maybe"}),
    "image http": picture("http://127.0.0.1/x.png"),
    "image file": picture("file:///etc/passwd"),
    "image base64": picture("data:image/png;base64,@@@"),
    "image no image": picture(data_url(b"hello")),
    "image number": picture(5),
    "image bomb": picture(bomb()),
    "images too many pixels": said({"role": "user", "content": [
        {"type": "image_url", "image_url": png(4000, 300)}] * 2}),
    "images too many": said({"role": "user", "content": [
        {"type": "image_url", "image_url": png(8, 8)}] * 5}),
    "video": picture("data:video/mp4;base64,AAAA", "video_url"),
    "prompt missing": (TEXT, {}),
    "prompt empty list": (TEXT, {"prompt": []}),
    "prompt number": (TEXT, {"prompt": 5}),
    "prompt id": (TEXT, {"prompt": [10**9]}),
    "prompt negative": (TEXT, {"prompt": [-1]}),
    "prompt mixed": (TEXT, {"prompt": [1, "x"]}),
    "prompt many": (TEXT, {"prompt": ["x"] * 100, "n": 2}),
    "suffix": (TEXT, {"prompt": "x", "suffix": "y"}),
    "best of": (TEXT, {"prompt": "x", "best_of": 3, "n": 2}),
    "nothing at all": (TEXT, {"prompt": "x", "max_tokens": 0}),
    "nothing of a chat": (CHAT, {"messages": HI, "max_tokens": 0}),
    "tokenize nothing": ("/tokenize", {}),
    "tokenize both": ("/tokenize", {"prompt": "x", "messages": HI}),
    "detokenize": ("/detokenize", {"tokens": [10**9]}),
    "anthropic no max": ("/v1/messages", {"messages": HI}),
    "anthropic block": ("/v1/messages", {"max_tokens": 1, "messages": [
        {"role": "user", "content": [{"type": "x"}]}]}),
    "anthropic thinking": ("/v1/messages", {"max_tokens": 1, "messages": HI,
                                            "thinking": {"type": "x"}}),
    "anthropic tool": ("/v1/messages", {"max_tokens": 1, "messages": HI,
                                        "tools": [{"type": "bash_1"}]}),
    "anthropic url": ("/v1/messages", {"max_tokens": 1, "messages": [
        {"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": "http://x"}}]}]}),
    "responses item": ("/v1/responses", {"input": [{"type": "x"}]}),
    "responses empty": ("/v1/responses", {"input": []}),
    "responses tool": ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}),
}  # fmt: skip
LIMITS = {"max_images": 4, "max_image_pixels": 2_000_000}


@pytest.fixture(scope="module")
def server():
    processor = ImageProcessor(patch_size=4)
    with serving(processor=processor, options=LIMITS, max_context=2000) as running:
        yield running


@pytest.mark.parametrize("name", BAD)
def test_malformed(server, name):
    path, body = BAD[name]
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if path != "/v1/messages":
        assert set(error) == {"message", "type", "param", "code"}
    assert len(answer.text) < 1000
    assert server.engine.running == {}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"messages": NaN}', b'{"messages":' + b"[" * 50_000,
     b'{"messages":[{"role":"user","content":"\\ud800"}]}', b'{"a":' * 5000 + b"1" + b"}" * 5000],
    ids=range(9),
)  # fmt: skip
def test_bodies_that_are_no_json_of_ours(server, body):
    headers = {"content-type": "application/json"}
    answer = server.client.post(CHAT, content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_forms_are_no_json(server):
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = server.client.post(CHAT, content=json.dumps(chat()[1]), headers=form)
    assert answer.status_code == 415


def test_paths_methods_and_models_that_do_not_exist(server):
    assert server.post("/v1/nothing", {}).status_code == 404
    assert server.client.get(CHAT).status_code == 405
    for path, body in (chat(model="other"), (TEXT, {"prompt": "x", "model": "other"})):
        answer = server.post(path, body)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert MODEL in answer.json()["error"]["message"]


def test_a_prompt_that_is_too_long_names_both_numbers(server):
    answer = server.post(TEXT, {"prompt": [1] * 2500})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "2500" in error["message"]
    assert "2000" in error["message"]
    assert error["param"] == "prompt"
    huge = said({"role": "user", "content": [{"type": "image_url", "image_url": png(900, 900)}]})
    assert server.post(*huge).json()["error"]["code"] == "context_length_exceeded"


def test_more_messages_than_can_fit_are_refused_before_they_are_rendered(server, monkeypatch):
    empty = {"role": "user", "content": ""}
    cost = server.post("/tokenize", {"messages": [empty] * 2}).json()["count"]
    cost -= server.post("/tokenize", {"messages": [empty]}).json()["count"]
    assert cost >= LEAST_OF_A_MESSAGE
    monkeypatch.setattr("openk3.api.openai.prepare.chat_prompt", lambda *_a, **_k: 1 / 0)
    error = server.post(*said(*[empty] * 400)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "at least 2400 tokens; the context holds 2000" in error["message"]


def test_a28_a_bad_grammar_fails_its_own_request_alone(server):
    server.engine.gate.clear()
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        running = [threads.submit(server.chat, "hi") for _ in range(3)]
        schema = {"type": "object", "properties": {"a": {"pattern": "(?<=x)y("}}}
        wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        answer = server.chat(response_format=wanted)
        assert answer.status_code == 400
        assert "grammar" in answer.json()["error"]["message"]
        server.engine.gate.set()
        assert [one.result(30).status_code for one in running] == [200] * 3
    assert server.client.get("/health").status_code == 200


def test_a27_different_pictures_make_different_requests(server):
    def ask(*pictures: str):
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
        content = [*parts, {"type": "text", "text": "what?"}]
        answer = server.post(CHAT, {"messages": [{"role": "user", "content": content}]})
        assert answer.status_code == 200, answer.text
        *_, request = server.engine.seen.values()
        return request, answer.json()["usage"]

    red, blue = png(16, 16), png(16, 16, "blue")
    first, usage = ask(red)
    second, _ = ask(blue)
    again, _ = ask(red)
    assert first.prompt_ids == second.prompt_ids == again.prompt_ids
    assert first.media.digests == again.media.digests != second.media.digests
    assert first.media.pixel_values.shape == (16, 3, 4, 4)
    media_id = tokenizer().special_id("<|media_pad|>")
    assert first.prompt_ids.count(media_id) == 1
    stub = 3
    assert usage["prompt_tokens"] == len(first.prompt_ids) - stub + 4 - 1  # 4 rows for one id
    forward, _ = ask(red, blue)
    swapped, _ = ask(blue, red)
    assert forward.media.digests == tuple(reversed(swapped.media.digests))


def test_a_typed_placeholder_stands_for_no_picture(server):
    text = {"role": "user", "content": "<|kimi_image_placeholder|> and <|media_pad|>"}
    shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": png(8, 8)}}]}
    assert server.post(CHAT, {"messages": [text, shown]}).status_code == 200
    *_, request = server.engine.seen.values()
    assert request.prompt_ids.count(tokenizer().special_id("<|media_pad|>")) == 1


def test_good_edges_are_not_refused(server):
    good = [
        chat(tools=[], tool_choice="auto"),
        chat(tool_choice="none"),
        chat(tools=[tool(parameters=None)], tool_choice="required"),
        chat(temperature=0, top_p=1, n=2, seed=2**63 - 1, top_k=-1, stop=None, tools=None),
        chat(response_format={"type": "text"}, thinking={"type": "enabled", "keep": "last"}),
        chat(unknown_field={"deep": 1}, store=True, user="x", metadata={}),
        said({"role": "developer", "content": "x"}, *HI),
        said(*HI, {"role": "assistant", "content": None}, *HI),
        said({"role": "user", "content": ""}),
        (TEXT, {"prompt": ""}),
        (TEXT, {"prompt": [[1, 2], [3]], "stop": ["a"], "logprobs": 0}),
    ]
    for path, body in good:
        answer = server.post(path, body)
        assert answer.status_code == 200, (body, answer.text)


def test_a_vocabulary_without_chat_tokens_goes_on_with_texts_alone(tmp_path):
    """And never writes the chat format's markup as ordinary text."""
    from openk3.text.train_tokenizer import train

    plain = train(["the weather is fine " * 20], 300, special_tokens=["[BOS]", "[EOS]"])
    ids = tuple(plain.encode("is fine"))
    with serving(lambda _: (*ids, plain.eos_id)) as server:
        server.state.tokenizer = plain
        server.state.vocab_size = plain.vocab_size
        said = server.post("/v1/completions", {"prompt": "the weather "}).json()
        assert said["choices"][0]["text"] == "is fine"
        assert said["choices"][0]["finish_reason"] == "stop"
        assert server.client.get("/v1/models").json()["data"][0]["supports_chat"] is False
        hi = {"messages": [{"role": "user", "content": "hi"}]}
        for path, body in (
            ("/v1/chat/completions", hi),
            ("/v1/messages", {**hi, "max_tokens": 3}),
            ("/v1/responses", {"input": "hi"}),
            ("/tokenize", hi),
            ("/v1/messages/count_tokens", hi),
        ):
            answer = server.post(path, body)
            assert answer.status_code == 400, path
            assert "no chat tokens" in answer.json()["error"]["message"]
        assert server.post("/tokenize", {"prompt": "hi"}).status_code == 200


MANY = 300_000
COUNTLESS = [
    (TEXT, {"prompt": ["a"] * MANY + [1]}),
    (TEXT, {"prompt": [1] * MANY + [[1]]}),
    (TEXT, {"prompt": "x", "logit_bias": dict.fromkeys(range(MANY), "x")}),
    (TEXT, {"prompt": "x", "stop": [1] * MANY}),
    (TEXT, {"prompt": "x", "stop_token_ids": ["a"] * MANY}),
    (CHAT, {"messages": [1] * MANY}),
    (CHAT, {"messages": HI, "tools": [1] * MANY}),
    ("/v1/messages", {"max_tokens": 1, "messages": [1] * MANY}),
    ("/v1/messages", {"max_tokens": 1, "messages": HI, "system": [1] * MANY}),
    ("/v1/responses", {"input": [1] * MANY}),
    ("/detokenize", {"tokens": ["a"] * MANY}),
]


@pytest.mark.parametrize(("path", "body"), COUNTLESS, ids=[str(b)[:24] for _, b in COUNTLESS])
def test_a_body_of_countless_mistakes_is_told_one(path, body, monkeypatch):
    """A list of every mistake would hold up all other callers: it takes a minute for a body of
    20 MB."""
    from openk3.api.openai import errors

    counts = []
    told = errors._invalid
    monkeypatch.setattr(
        errors, "_invalid", lambda error: (counts.append(error.error_count()), told(error))[1]
    )
    with serving() as server:
        answer = server.post(path, body)
    assert answer.status_code == 400
    assert len(answer.json()["error"]["message"]) < 200
    assert counts[0] < 10


def test_what_a_prompt_may_be_is_said(server):
    for wrong in (
        1.5,
        True,
        None,
        {"a": 1},
        [1.5],
        [True],
        ["a", 1],
        ["a", [1]],
        [[1], 1],
        [[[1]]],
    ):
        error = server.post(TEXT, {"prompt": wrong}).json()["error"]
        assert error["param"] == "prompt"
        assert error["message"].startswith("prompt: must be a text, token ids, or a list"), wrong
    for right in ("x", "", [5], ["x", "y"], [[5], [6]], [[]], [""]):
        assert server.post(TEXT, {"prompt": right}).status_code == 200, right
