"""An OpenAI-compatible server over a scripted engine, in a thread of the test process."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from openk3.api.auth import ApiKeys
from openk3.api.openai.app import create_app
from openk3.api.openai.options import ServeOptions
from openk3.api.openai.state import Serving
from openk3.api.serving import KEEP_ALIVE_S, listen
from openk3.engine.service import AsyncEngine
from scripted_engine import ScriptedEngine, ids_of, tokenizer

MODEL = "tiny-k3"


@dataclass
class Server:
    """A running server, and what the tests look at behind it."""

    url: str
    engine: Any
    state: Serving
    uvicorn: uvicorn.Server
    client: httpx.Client

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def settle(self) -> None:
        """Return once the engine has done what it was told before: commands keep their order."""
        assert self.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200

    def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of all events; the last is "[DONE]"."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def chat_stream(self, text: str = "hi", **fields: Any) -> list[Any]:
        messages = [{"role": "user", "content": text}]
        return self.stream("/v1/chat/completions", {"messages": messages, **fields})


@contextmanager
def serving(
    script: str | Sequence[int] | Any = "⟨C⟩response⟨S⟩⟨C⟩message⟨S⟩⟨E⟩",
    *,
    keys: Sequence[str] = (),
    engine: Any = None,
    processor: Any = None,
    vocab_size: int | None = None,
    options: dict[str, Any] | None = None,
    send_buffer: int = 0,
    **engine_options: Any,
) -> Iterator[Server]:
    """Every request gets `script`: marked text, ids, or a function of the request."""
    if isinstance(script, str):
        script = ids_of(script)
    answer = script if callable(script) else lambda _: script
    engine = engine or ScriptedEngine(answer, **engine_options)
    state = Serving(
        AsyncEngine(engine),
        tokenizer(),
        MODEL,
        vocab_size or tokenizer().vocab_size,
        keys=ApiKeys(keys),
        processor=processor,
        options=ServeOptions(**(options or {})),
    )
    sock = listen("127.0.0.1", 0)
    if send_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it
    config = uvicorn.Config(
        create_app(state),
        log_level="warning",
        lifespan="on",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = uvicorn.Server(config)
    started = threading.Event()

    async def run() -> None:
        task = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        started.set()
        await task

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert started.wait(60)
    try:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=30, verify=False) as client:
            yield Server(url, engine, state, server, client)
    finally:
        if isinstance(engine, ScriptedEngine):
            engine.gate.set()
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


def joined(events: Sequence[Any], choice: int = 0) -> dict[str, Any]:
    """A streamed chat answer put together, as a client does it."""
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    reasons = []
    for chunk in events:
        for part in [] if chunk == "[DONE]" else chunk["choices"]:
            if part["index"] != choice:
                continue
            delta = part["delta"]
            for key in ("content", "reasoning_content"):
                message[key] += delta.get(key, "")
            for call in delta.get("tool_calls", ()):
                at = calls.setdefault(call["index"], {"arguments": ""})
                at |= {key: call[key] for key in ("id", "type") if key in call}
                at["name"] = call["function"].get("name", at.get("name"))
                at["arguments"] += call["function"]["arguments"]
            reasons += [part["finish_reason"]] if part["finish_reason"] else []
    assert len(reasons) == 1, reasons
    return {**message, "calls": [calls[i] for i in sorted(calls)], "finish_reason": reasons[0]}
