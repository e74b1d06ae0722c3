"""Running an ASGI app: safe bindings, and a shutdown that lets requests finish."""

import asyncio
import json
import math
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from openk3.api.auth import ApiKeys, require_safe_binding
from openk3.api.patience import ACCEPTS, allow_many_files, impatient
from openk3.errors import ConfigError

GRACE_S = 5  # what requests in flight get after a first interrupt
BACKLOG = 2048  # connections that wait to be accepted
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, or they send into a closing one


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises ConfigError when it is taken, or none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # named as TCP, or asyncio does not turn Nagle's algorithm off: 40 ms for every small answer
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:  # the latter beyond 65535
        sock.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
    return sock


def serve(
    app: Any,
    *,
    host: str,
    port: int,
    keys: ApiKeys,
    sock: socket.socket | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
    on_interrupt: Callable[[], None] = lambda: None,
    grace_s: float = GRACE_S,
) -> None:
    """Serve until interrupted. `on_ready` gets the URL once the socket is bound.

    sock: from `listen`, if the port was taken before the app was made.
    on_interrupt: called when the first signal comes; requests in flight then have `grace_s`.

    Raises ConfigError for a taken port or an open server that strangers could reach.
    """
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    require_safe_binding(host, keys)
    sock = sock or listen(host, port)
    _begin(sock, host)
    max_callers = allow_many_files()
    shown = f"[{host}]" if ":" in host else host
    on_ready(f"http://{shown}:{sock.getsockname()[1]}")
    config = uvicorn.Config(
        CutOff(app),
        http=impatient(AutoHTTPProtocol, max_callers=max_callers),
        backlog=ACCEPTS,
        log_level="warning",
        timeout_graceful_shutdown=math.ceil(grace_s),
        timeout_keep_alive=KEEP_ALIVE_S,
        lifespan="on",
    )

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            sock.listen(BACKLOG)  # the system's queue; asyncio takes ACCEPTS of it at a time

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            on_interrupt()
            super().handle_exit(sig, frame)

    Server(config).run(sockets=[sock])


def _begin(sock: socket.socket, host: str) -> None:
    """Two servers that start together can both bind a port; only one of them can listen."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        where = f"{host}:{sock.getsockname()[1]}"
        sock.close()
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error


class CutOff:
    """What a second interrupt, or the end of their grace, cancels: requests are answered 503, in
    the shape of OpenAI's errors and of E2B's, and the application still cleans up."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, partial(_next_event, receive), send)
            return
        started = False

        async def noted(message: Any) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not started:
                await _unavailable(send, "the server was stopped before this request was finished")


async def _next_event(receive: Any) -> Any:
    try:
        return await receive()
    except asyncio.CancelledError:
        return {"type": "lifespan.shutdown"}


async def _unavailable(send: Any, message: str) -> None:
    error = {"message": message, "type": "overloaded_error", "param": None, "code": "stopped"}
    body = json.dumps({"code": 503, "message": message, "error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
