"""The server: routes, keys, limits, metrics, and a sweep when it starts."""

import asyncio
import time
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers

from openk3.api.auth import ApiKeys, given_key
from openk3.api.e2b import files, filesystem, process, rest, wire
from openk3.api.e2b.metrics import Metrics
from openk3.api.e2b.service import NotRunningError, Service
from openk3.api.limits import App, Limits, Receive, Scope, Send
from openk3.errors import OpenK3Error
from openk3.sandbox import events, recovery
from openk3.sandbox.backends import choose
from openk3.sandbox.pool import Pool
from openk3.sandbox.types import Capabilities

MAX_UPLOAD_BYTES = 2 << 30
SWEEP_EVERY_S = 60.0
OPEN_PATHS = ("/files", "/health", "/process.", "/filesystem.")  # these ask for a box's own token


def create_app(
    pool: Pool,
    keys: ApiKeys,
    *,
    backend: str = "auto",
    files_only: bool = False,
    max_upload_bytes: int = MAX_UPLOAD_BYTES,
    max_requests: int = 512,
    sdk_generation: int = 2,
) -> FastAPI:
    """An ASGI app over the sandboxes of `pool`.

    files_only: accept backend `bwrap`, where processes do not survive a pause.
    sdk_generation: 1 hides the newer `/v2/` spellings of create and connect.
    """

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        found = await choose(backend, pool, files_only)
        await asyncio.to_thread(recovery.sweep, pool.home)
        capabilities = Capabilities(**found.capabilities)
        app.state.service = Service(pool, keys, found.backend, capabilities)
        if found.capabilities["memory"]:
            await pool.warm()
        sweeper = asyncio.create_task(_sweep(pool))
        yield
        sweeper.cancel()
        for watcher in app.state.watchers.values():
            watcher.task.cancel()
        await app.state.service.close()

    app = FastAPI(title="OpenK3 sandboxes", version="1", lifespan=life)
    app.state.watchers = {}
    app.state.metrics = Metrics(pool.home)
    app.add_exception_handler(OpenK3Error, rest.on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_middleware(Guard, keys=keys, metrics=app.state.metrics, sdk_generation=sdk_generation)
    app.add_middleware(Limits, max_body_bytes=max_upload_bytes, max_requests=max_requests)
    for part in (rest, process, filesystem, files):
        app.include_router(part.router)
    app.get("/health")(_health)
    app.get("/metrics")(_metrics)
    return app


async def _sweep(pool: Pool) -> None:
    while True:
        await asyncio.sleep(SWEEP_EVERY_S)
        try:
            await asyncio.to_thread(recovery.sweep, pool.home)
        except (OpenK3Error, OSError) as error:
            events.emit(pool.home, "sweep_failed", "", reason=str(error))


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), "registered for that class only"
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return JSONResponse({"code": 400, "message": f"{where}: {first['msg']}"}, 400)


async def _health(request: Request) -> Response:
    """204 for the server, and for a sandbox that runs."""
    sandbox_id = request.headers.get("e2b-sandbox-id")
    if sandbox_id:
        try:
            request.app.state.service.running(sandbox_id)
        except NotRunningError as error:
            return wire.gone(error, sandbox_id)
    return Response(status_code=204)


async def _metrics(request: Request) -> Response:
    text = await asyncio.to_thread(request.app.state.metrics.render)
    return Response(text, media_type="text/plain; version=0.0.4")


class Guard:
    """Asks for the API key and counts answers. Pure ASGI, so that routes hear of a hang-up."""

    def __init__(self, app: App, keys: ApiKeys, metrics: Metrics, sdk_generation: int) -> None:
        self.app, self.keys, self.metrics = app, keys, metrics
        self.sdk_generation = sdk_generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path, key = scope["path"], given_key(Headers(scope=scope))
        if not path.startswith(OPEN_PATHS) and not self.keys.accept(key):
            return await _refusal(401, "API key missing or wrong")(scope, receive, send)
        if self.sdk_generation == 1 and path.startswith("/v2/") and scope["method"] == "POST":
            return await _refusal(405, "method not allowed")(scope, receive, send)
        started = time.perf_counter()

        async def observed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                operation = getattr(scope.get("route"), "name", "unknown")
                self.metrics.observe(operation, message["status"], time.perf_counter() - started)
            await send(message)

        return await self.app(scope, receive, observed)


def _refusal(code: int, message: str) -> JSONResponse:
    return JSONResponse({"code": code, "message": message}, code)
