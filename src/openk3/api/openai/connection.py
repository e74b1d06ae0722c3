"""Callers that may leave or stop reading: answers end, and work for them ends, when they do."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from openk3.api.openai.errors import ApiError
from openk3.obs import log

T = TypeVar("T")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; it is cancelled when the caller hangs up (then ApiError 499)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the caller went away")
    finally:
        await _cancel(gone)
        await _cancel(task)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: "asyncio.Future[Any]") -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


def event(data: object, name: str | None = None) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else dump(data)
    lead = f"event: {name}\n" if name else ""
    return f"{lead}data: {text}\n\n".encode("utf-8", "replace")


def dump(data: object) -> str:
    """Compact JSON; numbers that JSON does not have are a mistake of ours."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class EventStream(Response):
    """An ASGI answer of server-sent events. `on_end` is called however it ends."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], stall_s: float, on_end: Callable[[], None]
    ) -> None:
        super().__init__()
        self._events, self._stall_s, self._on_end = events, stall_s, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(_hung_up(receive))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._on_end()
            await _cancel(gone)
            await _cancel(writing)
        if not writing.cancelled():
            writing.result()

    async def _write(self, send: Send) -> None:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache",
                   "x-accel-buffering": "no"}  # fmt: skip
        raw = [(key.encode(), value.encode()) for key, value in headers.items()]
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            async for piece in self._events:
                try:
                    async with asyncio.timeout(self._stall_s):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                except TimeoutError:
                    log.get("api").warning("a reader took nothing for %g s", self._stall_s)
                    return
            await send({"type": "http.response.body", "body": b""})
