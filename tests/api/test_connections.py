"""Callers that leave, stall, come too often or without a key; time limits; shutdown."""

import asyncio
import concurrent.futures
import contextlib
import json
import socket
import threading

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
httpx = pytest.importorskip("httpx", reason="the serve extra is not installed")

from openai_server import serving  # noqa: E402
from openk3.api.auth import ApiKeys  # noqa: E402
from openk3.api.openai.guard import Guard  # noqa: E402
from openk3.api.serving import CutOff  # noqa: E402
from openk3.engine.types import Output  # noqa: E402
from scripted_engine import ScriptedEngine, ids_of  # noqa: E402

LONG = ids_of("hm⟨C⟩think⟨S⟩⟨O⟩response⟨S⟩") + ids_of("x") * 90_000
HI = {"messages": [{"role": "user", "content": "hi"}]}


def connect(server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def request_bytes(body: dict, path: str = "/v1/chat/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def wait_for_abort(server) -> None:
    """Until the engine was told, and has done what it was told."""
    assert server.engine.told.wait(30)
    server.settle()


@pytest.mark.parametrize("stream", [True, False])
def test_a16_a17_a_caller_that_hangs_up_ends_the_work(stream):
    with serving(LONG, step_s=0.001) as server:
        sock = connect(server)
        sock.sendall(request_bytes({**HI, "stream": stream}))
        if stream:
            assert b"data:" in sock.recv(4096) + sock.recv(4096)
        else:
            server.settle()  # the other request came first
        sock.close()
        wait_for_abort(server)
        assert server.engine.running == {}
        assert len(server.engine.aborts) == 1
        ends = counted(server.state.metrics.success, "finished_reason")
        assert (ends.pop("abort"), set(ends)) == (1, {"length"})
        assert server.chat(max_tokens=2).status_code == 200  # nothing else suffers


def test_a17_a_normal_end_aborts_nothing():
    with serving("ok⟨E⟩") as server:
        for stream in (False, True):
            server.post("/v1/chat/completions", {**HI, "stream": stream})
        assert server.engine.aborts == []


def test_a_reader_that_takes_nothing_is_cut_off():
    options = {"stall_timeout_s": 0.2}
    with (
        serving(LONG, step_s=0.001, send_buffer=4096, options=options) as server,
        connect(server) as sock,
    ):
        body = {**HI, "stream": True, "logprobs": True, "top_logprobs": 20}
        sock.sendall(request_bytes(body))
        wait_for_abort(server)
        assert server.engine.running == {}


def test_no_token_in_time_is_a_503_that_says_when_to_come_back():
    with serving("ok⟨E⟩", options={"queue_timeout_s": 0.05}) as server:
        server.engine.gate.clear()
        answer = server.chat()
        server.engine.gate.set()
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        wait_for_abort(server)
        assert server.engine.running == {}


def test_at_the_time_limit_an_answer_ends_with_what_it_has():
    with serving(LONG, step_s=0.001, options={"time_limit_s": 0.2}) as server:
        answer = server.chat().json()
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert answer["choices"][0]["message"]["content"].startswith("x")
        wait_for_abort(server)


def test_a_full_queue_is_429_and_too_many_requests_at_once_503():
    options = {"max_requests": 2, "body_timeout_s": 0.5}
    with (
        serving(LONG, step_s=0.001, max_queued=1, options=options) as server,
        connect(server) as first,
        connect(server) as second,
    ):
        first.sendall(request_bytes({**HI, "stream": True}))
        first.recv(100)
        answer = server.chat()
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        head = request_bytes(HI).partition(b"\r\n\r\n")[0]
        second.sendall(head + b"\r\n\r\n{")  # the rest never comes
        while (refused := server.client.get("/v1/models")).status_code == 200:
            pass
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "overloaded_error"
        assert server.client.get("/health").status_code == 200
        told = b""
        while piece := second.recv(1000):  # and the connection is closed
            told += piece
        assert told.startswith(b"HTTP/1.1 408 ")


def test_a_body_over_the_limit_is_413_declared_or_not():
    with serving(options={"max_body_bytes": 1000}) as server:
        large = {"messages": [{"role": "user", "content": "x" * 2000}]}
        assert server.post("/v1/chat/completions", large).status_code == 413

        def pieces():
            for _ in range(50):
                yield b" " * 100

        headers = {"content-type": "application/json"}
        answer = server.client.post("/v1/chat/completions", content=pieces(), headers=headers)
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "the body is larger than 1000 bytes"


def counted(counter, label: str) -> dict[str, float]:
    """What a counter says, by one of its labels."""
    samples = counter.collect()[0].samples
    return {s.labels[label]: s.value for s in samples if s.name.endswith("_total")}


def answers(server, route: str = "/v1/chat/completions") -> dict[str, float]:
    """How many answers of each status were counted."""
    family = server.state.metrics.answers.collect()[0]
    return {s.labels["status"]: s.value for s in family.samples
            if s.name.endswith("_total") and s.labels["route"] == route}  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/messages"])
def test_a_caller_that_leaves_in_the_middle_of_its_body_is_no_mistake_of_ours(path, caplog):
    with serving("ok⟨E⟩") as server:
        with connect(server) as sock:
            sock.sendall(request_bytes({**HI, "max_tokens": 5}, path)[:-5])
        while answers(server, path) != {"499": 1}:
            server.settle()
        assert server.chat().status_code == 200
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_mistake_of_ours_is_counted_and_tells_nothing(monkeypatch):
    def mistake(*_args):
        raise RuntimeError("secret")

    with serving("ok⟨E⟩") as server:
        monkeypatch.setattr(server.state.tokenizer, "encode_segments", mistake)
        answer = server.chat()
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "internal error"
        monkeypatch.undo()
        assert server.chat().status_code == 200
        assert answers(server) == {"500": 1, "200": 1}


@pytest.mark.parametrize(
    ("end", "status"),
    [(None, 499), (RuntimeError("x"), 500), (asyncio.CancelledError(), 503)],
    ids=["the caller left", "a mistake", "a shutdown"],
)
def test_what_was_never_answered_is_counted_too(end, status):
    async def app(scope, receive, send):
        if end is not None:
            raise end

    counts = []
    guard = Guard(app, ApiKeys(), (), lambda route, status: counts.append((route, status)))
    scope = {"type": "http", "path": "/x", "method": "GET", "headers": [(b"host", b"127.0.0.1")]}
    with contextlib.suppress(RuntimeError, asyncio.CancelledError):
        asyncio.run(guard(scope, None, None))
    assert counts == [("other", status)]


def test_keys_open_all_but_the_page_and_health():
    with serving("ok⟨E⟩", keys=["sk-a", "sk-b"]) as server:
        for path in ("/", "/health", "/ready", "/version"):
            assert server.client.get(path).status_code == 200
        for path in ("/v1/models", "/metrics"):
            answer = server.client.get(path)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert server.chat().status_code == 401
        for headers in ({"authorization": "Bearer sk-a"}, {"x-api-key": "sk-b"}):
            assert server.client.get("/v1/models", headers=headers).status_code == 200
            server.post("/v1/chat/completions", HI, headers=headers)
        salts = {request.salt for request in server.engine.seen.values()}
        assert len(salts) == 2, "callers with keys of their own share no prefix"
        assert not any("sk-" in salt for salt in salts)


def test_pages_of_other_origins_are_refused_unless_allowed():
    origin = {"origin": "https://evil.example"}
    with serving("ok⟨E⟩") as server:
        answer = server.post("/v1/chat/completions", HI, headers=origin)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        same = {"origin": server.url}
        assert server.post("/v1/chat/completions", HI, headers=same).status_code == 200
        rebound = server.client.get("/v1/models", headers={"host": "evil.example"})
        assert rebound.status_code == 403
    with serving("ok⟨E⟩", options={"allow_origins": ("https://evil.example",)}) as server:
        answer = server.post("/v1/chat/completions", HI, headers=origin)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://evil.example"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_is_told_to_everybody():
    with serving(LONG, step_s=0.001) as server:
        server.engine.fail_at_step = 50
        events = server.chat_stream()
        assert events[-1]["error"]["type"] == "server_error"
        assert "scripted" not in json.dumps(events[-1])
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/ready").status_code == 503
        refused = server.chat()
        assert refused.status_code == 503
        assert "scripted" not in refused.text


class Failing(ScriptedEngine):
    """Ends requests whose prompt is longer than 700 with an error, as for logits of NaN."""

    def _advance(self, request, left):
        if len(request.prompt_ids) > 700:
            del self.running[request.id]
            return Output(request.id, (), "error", error="its logits are not finite")
        return super()._advance(request, left)


def test_a_request_that_fails_is_a_500_and_no_other_is_harmed():
    with serving(engine=Failing(lambda _: ids_of("ok⟨E⟩"))) as server:
        answer = server.chat("the weather " * 500)
        assert answer.status_code == 500
        assert "not finite" in answer.json()["error"]["message"]
        assert counted(server.state.metrics.success, "finished_reason") == {"error": 1}
        assert server.chat("hi").status_code == 200


class FailingLate(ScriptedEngine):
    """Ends every request with an error after two tokens, once it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda _: ids_of("xyz"), step_s=0.001)
        self.may_fail = threading.Event()

    def _advance(self, request, left):
        if len(left) > 1:
            return super()._advance(request, left)
        if not self.may_fail.is_set():
            return Output(request.id, ())
        del self.running[request.id]
        return Output(request.id, (), "error", error="its logits are not finite")


ENDPOINTS = {
    "/v1/chat/completions": HI,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**HI, "max_tokens": 99},
}


def told_reason(path: str, last: dict) -> str:
    """Where a client of an endpoint looks for what went wrong in mid-stream."""
    if path == "/v1/responses":
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        return last["response"]["error"]["message"]
    assert last["error"]["type"] == "server_error"
    assert (last.get("type") == "error") == (path == "/v1/messages")
    return last["error"]["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_failure_after_the_first_tokens_is_told_by_every_endpoint(path):
    engine = FailingLate()
    body = ENDPOINTS[path]
    with serving(engine=engine) as server:
        with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines)  # it has begun
            engine.may_fail.set()
            events = [line[6:] for line in lines if line.startswith("data: ")]
        whole = server.post(path, body)
    assert (answer.status_code, whole.status_code) == (200, 500)
    for told in (whole.json()["error"]["message"], told_reason(path, json.loads(events[-1]))):
        assert told == "generation failed: its logits are not finite"


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_salt_separates_prefixes_at_every_endpoint(path):
    with serving("ok⟨E⟩") as server:
        for salt in ("a", "b"):
            assert server.post(path, {**ENDPOINTS[path], "cache_salt": salt}).status_code == 200
        assert len({request.salt for request in server.engine.seen.values()}) == 2


def test_shutdown_hands_back_what_still_runs():
    with serving(LONG, step_s=0.001) as server, concurrent.futures.ThreadPoolExecutor(2) as threads:
        streaming = threads.submit(server.chat_stream)
        while not server.engine.running:
            server.settle()
        server.state.service.drain()
        assert server.client.get("/ready").status_code == 503
        refused = server.chat()
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        loop = server.state.service._loop
        loop.call_soon_threadsafe(server.state.service.abort_all)
        events = streaming.result(30)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "abort"
    assert events[-2]["usage"]["completion_tokens"] > 0


def test_metrics_have_the_names_of_dashboards():
    with serving("ok⟨E⟩") as server:
        server.chat("the weather in Paris " * 10)
        server.chat("the weather in Paris " * 10)
        text = server.client.get("/metrics").text
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
        "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total", "k3:longest_wait_seconds",
        "vllm:num_preemptions_total", "vllm:time_to_first_token_seconds_bucket",
        "vllm:request_time_per_output_token_seconds_bucket",
        "vllm:e2e_request_latency_seconds_count", "vllm:request_success_total",
    ):  # fmt: skip
        assert f"{name}{{" in text, name
    assert 'k3:min_cacheable_tokens{model_name="tiny-k3"} 16.0' in text  # A13
    assert 'vllm:request_success_total{finished_reason="stop",model_name="tiny-k3"} 2.0' in text


def test_neither_keys_nor_prompts_reach_the_log(caplog, capfd):
    with serving("secretanswer⟨E⟩", keys=["sk-secret"]) as server:
        headers = {"authorization": "Bearer sk-secret"}
        text = {"messages": [{"role": "user", "content": "secretprompt"}]}
        server.post("/v1/chat/completions", text, headers=headers)
        server.post("/v1/chat/completions", {**text, "n": "secretn"}, headers=headers)
        server.post("/v1/chat/completions", text, headers={"authorization": "Bearer sk-secret2"})
    out = capfd.readouterr()
    assert "secret" not in caplog.text + out.out + out.err


@pytest.mark.parametrize("begun", [False, True])
def test_a_request_that_is_cut_off_when_the_server_ends_is_told(begun):
    sent = []

    async def app(scope, receive, send):
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    async def go():
        task = asyncio.create_task(CutOff(app)({"type": "http"}, None, send))
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(go())
    assert [m["status"] for m in sent if m["type"] == "http.response.start"] == [
        200 if begun else 503
    ]
    if not begun:
        assert "was stopped" in json.loads(sent[1]["body"])["error"]["message"]


def test_an_application_that_is_cancelled_still_cleans_up():
    seen = []

    async def app(scope, receive, send):
        seen.append(await receive())
        seen.append(await receive())
        await send("cleaned up")

    async def go():
        events, sent = asyncio.Queue(), asyncio.Queue()
        events.put_nowait({"type": "lifespan.startup"})
        task = asyncio.create_task(CutOff(app)({"type": "lifespan"}, events.get, sent.put))
        while not seen:
            await asyncio.sleep(0)
        task.cancel()
        await task
        return sent.get_nowait()

    assert asyncio.run(go()) == "cleaned up"
    assert [event["type"] for event in seen] == ["lifespan.startup", "lifespan.shutdown"]
