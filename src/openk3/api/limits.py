"""Bounds on what a caller may make a server hold: body bytes and requests at once (pure ASGI)."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class TooLargeError(Exception):
    """A body grew beyond its limit while it was read."""


class Limits:
    """Wraps an ASGI app. Beyond `max_requests` callers get 503 and are told to come back."""

    def __init__(self, app: App, max_body_bytes: int, max_requests: int) -> None:
        self.app, self.max_body_bytes, self.max_requests = app, max_body_bytes, max_requests
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {key.decode().lower(): value.decode() for key, value in scope["headers"]}
        if int(headers.get("content-length") or 0) > self.max_body_bytes:
            return await refuse(send, 413, f"the body is larger than {self.max_body_bytes} bytes")
        if self.active >= self.max_requests:
            return await refuse(send, 503, "too many requests at once", {"retry-after": "1"})
        self.active += 1
        try:
            return await self.app(scope, self._counted(receive), send)
        finally:
            self.active -= 1

    def _counted(self, receive: Receive) -> Receive:
        left = self.max_body_bytes

        async def take() -> MutableMapping[str, Any]:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise TooLargeError(f"the body is larger than {self.max_body_bytes} bytes")
            return message

        return take


async def refuse(
    send: Send, status: int, message: str, headers: dict[str, str] | None = None
) -> None:
    """Answer with a JSON error without calling the app."""
    body = json.dumps({"code": status, "message": message}).encode()
    pairs = {"content-type": "application/json", "content-length": str(len(body))}
    raw = [(key.encode(), value.encode()) for key, value in {**pairs, **(headers or {})}.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
