"""The server: routes, keys, limits, errors, and the engine's life."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from openk3._version import __version__
from openk3.api.limits import Limits, TooLargeError
from openk3.api.openai import anthropic, chat, completions, info, responses
from openk3.api.openai.errors import ApiError, as_api_error
from openk3.api.openai.guard import Guard
from openk3.api.openai.state import Serving
from openk3.errors import OpenK3Error


def create_app(state: Serving) -> FastAPI:
    """An ASGI app over an engine. Its life span starts and closes the engine's thread."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        await state.service.start()
        yield
        await state.service.close()  # the server has given requests their grace already

    app = FastAPI(title="OpenK3", version=__version__, lifespan=life, openapi_url=None)
    app.state.serving = state
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(OpenK3Error, _on_our_error)
    app.add_exception_handler(TooLargeError, _on_too_large)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_mistake)
    options, metrics = state.options, state.metrics

    def count(route: str, status: int) -> None:
        metrics.answers.labels(state.model, route, str(status)).inc()

    app.add_middleware(
        Limits,  # type: ignore[arg-type]
        max_body_bytes=options.max_body_bytes,
        max_requests=options.max_requests,
        body=lambda status, text: ApiError(status, text).body(),
        exempt=("/health", "/ready", "/metrics"),
    )
    app.add_middleware(Guard, keys=state.keys, origins=options.allow_origins, count=count)
    if options.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.allow_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    for part in (chat, completions, responses, anthropic, info):
        app.include_router(part.router)
    return app


def _answer(request: Request, error: ApiError) -> Response:
    if request.url.path.startswith(anthropic.PATH):
        return error.response(anthropic.error_body(error))
    return error.response()


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for that class only"
    return _answer(request, error)


async def _on_our_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OpenK3Error), "registered for that class only"
    return _answer(request, as_api_error(error))


async def _on_too_large(request: Request, error: Exception) -> Response:
    return _answer(request, ApiError(413, str(error), "request_too_large"))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for that class only"
    message = f"{request.method} {request.url.path:.200}: {error.detail}"
    headers = dict(error.headers or {})
    return _answer(request, ApiError(error.status_code, message, headers=headers))


async def _on_mistake(request: Request, error: Exception) -> Response:
    """A mistake of ours: the caller is told no more than that; the log has the trace.

    uvicorn closes the connection behind it, so nobody may send another request into that."""
    headers = {"connection": "close"}
    return _answer(request, ApiError(500, "internal error", "internal_error", headers=headers))
