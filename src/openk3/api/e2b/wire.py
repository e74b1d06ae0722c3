"""Connect over HTTP with JSON: unary calls, streams of framed messages, and errors."""

import asyncio
import base64
import binascii
import hmac
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Security
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.security import APIKeyHeader

from openk3.api.e2b.models import FAILURES
from openk3.api.e2b.service import NotRunningError, Service
from openk3.errors import (
    ConflictError,
    DeniedError,
    InputError,
    LimitError,
    NotFoundError,
    OpenK3Error,
    StorageError,
)
from openk3.sandbox.local import LocalSandbox

END_STREAM = 2
TOKEN = APIKeyHeader(name="X-Access-Token", scheme_name="SandboxToken", auto_error=False)
HTTP_OF_CODE = {
    "invalid_argument": 400,
    "unauthenticated": 401,
    "permission_denied": 403,
    "not_found": 404,
    "already_exists": 409,
    "failed_precondition": 400,
    "resource_exhausted": 429,
    "deadline_exceeded": 504,
    "unavailable": 503,
    "internal": 500,
}
CODES: tuple[tuple[type[OpenK3Error], str], ...] = (
    (NotFoundError, "not_found"),
    (InputError, "invalid_argument"),
    (DeniedError, "permission_denied"),
    (LimitError, "resource_exhausted"),
    (StorageError, "resource_exhausted"),
    (ConflictError, "unavailable"),
)


def code_of(error: OpenK3Error) -> str:
    if isinstance(error, AlreadyExistsError):
        return "already_exists"
    return next((code for kind, code in CODES if isinstance(error, kind)), "internal")


def error_response(code: str, message: str) -> JSONResponse:
    return JSONResponse({"code": code, "message": message}, HTTP_OF_CODE[code])


def gone(error: NotRunningError, sandbox_id: str | None) -> JSONResponse:
    """What the proxy before a sandbox answers when there is none."""
    return JSONResponse({"sandboxId": sandbox_id, "message": str(error), "code": 502}, 502)


def frame(value: dict[str, Any], flags: int = 0) -> bytes:
    raw = json.dumps(value).encode()
    return struct.pack(">BI", flags, len(raw)) + raw


def user_of(request: Request) -> str | None:
    """The user inside, which the SDK sends as a Basic-auth name."""
    scheme, _, word = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return request.query_params.get("username")
    try:
        return base64.b64decode(word).decode().partition(":")[0] or None
    except (binascii.Error, UnicodeDecodeError):
        raise InputError("the Authorization header is no Basic authentication") from None


def inside(request: Request, service: Service) -> LocalSandbox:
    """The sandbox a call is for, if the caller holds its token.

    Raises NotRunningError, DeniedError.
    """
    sandbox_id = request.headers.get("e2b-sandbox-id") or request.query_params.get("sandbox_id")
    handle = service.running(sandbox_id)
    given = request.headers.get("x-access-token", "")
    if service.keys and not same(given, service.token(handle.id)):
        raise DeniedError("the access token of this sandbox is missing or wrong")
    return handle


def same(given: str, wanted: str) -> bool:
    """Whether a secret is right, in time that does not tell how nearly."""
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())


def router_inside(tag: str, prefix: str = "") -> APIRouter:
    """Routes that go inside a sandbox, which its own token opens; `inside` asks for it."""
    return APIRouter(prefix=prefix, tags=[tag], dependencies=[Security(TOKEN)], responses=FAILURES)


def described(*methods: str, stream: bool = False) -> dict[str, Any]:
    """What the OpenAPI document says of the bodies of Connect methods."""
    kind = "application/connect+json" if stream else "application/json"
    text = "Messages in frames of Connect. " if stream else ""
    body = {"content": {kind: {"schema": {"type": "object"}}}, "description": text}
    listed = f"Methods: {', '.join(methods)}" if methods else None
    return {"openapi_extra": {"requestBody": body}, "description": listed}


class AlreadyExistsError(ConflictError):
    """A folder that was to be made is there."""


Unary = Callable[[LocalSandbox, dict[str, Any], Request], Awaitable[dict[str, Any]]]
Stream = Callable[[LocalSandbox, dict[str, Any], Request], AsyncIterator[dict[str, Any]]]


async def answer_unary(request: Request, service: Service, method: Unary) -> Response:
    """Run one unary method."""
    try:
        handle = inside(request, service)
        body = json.loads(await request.body() or b"{}")
        return JSONResponse(await method(handle, body, request))
    except NotRunningError as error:
        return gone(error, request.headers.get("e2b-sandbox-id"))
    except DeniedError as error:
        code = "unauthenticated" if "token" in str(error) else "permission_denied"
        return error_response(code, str(error))
    except (ValueError, KeyError, TypeError) as error:
        return error_response("invalid_argument", f"unusable request: {error}")
    except OpenK3Error as error:
        return error_response(code_of(error), str(error))


async def messages(request: Request) -> AsyncIterator[dict[str, Any]]:
    """The framed messages of a request body, as they arrive."""
    buffer = bytearray()
    async for piece in request.stream():
        buffer += piece
        while len(buffer) >= 5:
            flags, length = struct.unpack_from(">BI", buffer)
            if len(buffer) < 5 + length:
                break
            raw = bytes(buffer[5 : 5 + length])
            del buffer[: 5 + length]
            if not flags & END_STREAM:
                yield json.loads(raw)


async def answer_stream(request: Request, service: Service, method: Stream) -> Response:
    """Run one server-streaming method; errors travel in the last frame."""
    try:
        handle = inside(request, service)
        body = await anext(messages(request), {})
    except NotRunningError as error:
        return gone(error, request.headers.get("e2b-sandbox-id"))
    except DeniedError as error:
        return error_response("unauthenticated", str(error))
    except ValueError as error:
        return error_response("invalid_argument", f"unusable request: {error}")
    interval = float(request.headers.get("keepalive-ping-interval") or 50)
    source = with_keepalive(method(handle, body, request), interval)
    return StreamingResponse(_frames(source), media_type="application/connect+json")


async def answer_client_stream(request: Request, service: Service, method: Stream) -> Response:
    """Run one client-streaming method, which reads the rest of the messages itself."""
    try:
        handle = inside(request, service)
        source = messages(request)
        body = await anext(source, {})
        request.state.messages = source
    except NotRunningError as error:
        return gone(error, request.headers.get("e2b-sandbox-id"))
    except DeniedError as error:
        return error_response("unauthenticated", str(error))
    return StreamingResponse(
        _frames(method(handle, body, request)), media_type="application/connect+json"
    )


async def _frames(source: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for message in source:
            yield frame(message)
    except OpenK3Error as error:
        yield frame({"error": {"code": code_of(error), "message": str(error)}}, END_STREAM)
    except TimeoutError as error:
        yield frame({"error": {"code": "deadline_exceeded", "message": str(error)}}, END_STREAM)
    else:
        yield frame({}, END_STREAM)


KEEPALIVE: dict[str, Any] = {"keepalive": {}}


async def with_keepalive(
    source: AsyncIterator[dict[str, Any]], interval: float
) -> AsyncIterator[dict[str, Any]]:
    """Messages of `source`, and a sign of life whenever it has been silent for `interval` s."""
    waiting = asyncio.ensure_future(anext(source))
    try:
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=interval)
            if not done:
                yield KEEPALIVE
                continue
            try:
                message = waiting.result()
            except StopAsyncIteration:
                return
            waiting = asyncio.ensure_future(anext(source))
            yield message
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await source.aclose()  # type: ignore[attr-defined]
