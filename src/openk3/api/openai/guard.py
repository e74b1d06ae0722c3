"""Who may call: keys, origins, hosts. And the count of what was answered (pure ASGI)."""

import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openk3.api.auth import LOOPBACK, ApiKeys, given_key
from openk3.api.openai.errors import ApiError

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/version"))


class Guard:
    """Lets a request pass, or answers 401 or 403.

    A page of another site must not use a server through its visitor's browser: its origin has to be
    allowed. A server without keys is for this machine, so it must be addressed as such (which a
    name that was made to point here is not).
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        origins: tuple[str, ...],
        count: Callable[[str, int], None],
    ) -> None:
        self.app, self.keys, self.origins, self.count = app, keys, origins, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        status: int | None = None

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._count(scope, message["status"])
            await send(message)

        refusal = self._refusal(scope["path"], scope["method"], Headers(scope=scope))
        try:
            if refusal is not None:
                await refusal.response()(scope, receive, counted)
            else:
                await self.app(scope, receive, counted)
        finally:
            if status is None:
                self._count(scope, _unanswered(sys.exception()))

    def _count(self, scope: Scope, status: int) -> None:
        route: Any = scope.get("route")
        self.count(getattr(route, "path", "other"), status)

    def _refusal(self, path: str, method: str, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        origin = headers.get("origin")
        allowed = (*self.origins, f"http://{host}", f"https://{host}")
        if origin and origin not in allowed and "*" not in self.origins:
            return ApiError(403, f"origin {origin:.100} is not allowed", "origin_not_allowed")
        if not self.keys and _name(host) not in LOOPBACK:
            return ApiError(403, "a server without keys answers on this machine only", "bad_host")
        if method == "OPTIONS" or path in OPEN_PATHS or self.keys.accept(given_key(headers)):
            return None
        return ApiError(
            401, "the API key is missing or wrong", "invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )  # fmt: skip


def _unanswered(error: BaseException | None) -> int:
    """What the layers around say for us: a mistake of ours, a shutdown; or nothing, to nobody."""
    if error is None:
        return 499
    return 500 if isinstance(error, Exception) else 503


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # not even the form of a host
        return ""
