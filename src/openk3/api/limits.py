"""Bounds on what a caller may make a server hold: body bytes and requests at once (pure ASGI)."""

import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class TooLargeError(Exception):
    """A body grew beyond its limit while it was read."""


class Limits:
    """Wraps an ASGI app. Beyond `max_requests` callers get 503 and are told to come back.

    body: the JSON of a refusal, from its status and message.
    exempt: paths that are answered however many requests there are.
    """

    def __init__(
        self,
        app: App,
        max_body_bytes: int,
        max_requests: int,
        body: Callable[[int, str], object] = lambda status, text: {"code": status, "message": text},
        exempt: Collection[str] = (),
    ) -> None:
        self.app, self.max_body_bytes, self.max_requests = app, max_body_bytes, max_requests
        self.body, self.exempt = body, exempt
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self.exempt:
            return await self.app(scope, receive, send)
        sizes = [value for key, value in scope["headers"] if key.lower() == b"content-length"]
        size = sizes[0].decode("latin-1") if sizes else "0"
        if size.isdigit() and int(size[:20]) > self.max_body_bytes:
            message = f"the body is larger than {self.max_body_bytes} bytes"
            return await refuse(send, 413, self.body(413, message))
        if self.active >= self.max_requests:
            refusal = self.body(503, "too many requests at once")
            return await refuse(send, 503, refusal, {"retry-after": "1"})
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
    send: Send, status: int, answer: object, headers: dict[str, str] | None = None
) -> None:
    """Answer with a JSON error without calling the app."""
    body = json.dumps(answer).encode()
    pairs = {"content-type": "application/json", "content-length": str(len(body))}
    raw = [(key.encode(), value.encode()) for key, value in {**pairs, **(headers or {})}.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
