"""`GET` and `POST /files`: whole files in and out of a sandbox."""

import base64
import hashlib
import time
import zlib
from collections.abc import AsyncIterator

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import UploadFile

from openk3.api.e2b import wire
from openk3.api.e2b.service import NotRunningError, Service, status_of
from openk3.api.limits import TooLargeError
from openk3.errors import DeniedError, InputError, OpenK3Error
from openk3.sandbox.local import LocalSandbox
from openk3.sandbox.types import Entry

router = wire.router_inside("files")


def _box(request: Request, service: Service, operation: str) -> LocalSandbox:
    """By token, or by a signature over path, operation and user that the token was used for."""
    query = request.query_params
    signature = query.get("signature")
    if not signature:
        return wire.inside(request, service)
    box = service.running(request.headers.get("e2b-sandbox-id") or query.get("sandbox_id"))
    token, expires = service.token(box.id), query.get("signature_expiration")
    words = [query.get("path", ""), operation, query.get("username", ""), token]
    raw = ":".join([*words, expires] if expires else words)
    digest = base64.b64encode(hashlib.sha256(raw.encode()).digest()).rstrip(b"=").decode()
    if not wire.same(signature, f"v1_{digest}"):
        raise DeniedError("the signature of this token is wrong")
    if expires and (not expires.isdigit() or int(expires) < time.time()):
        raise DeniedError("the signature of this token has expired")
    return box


@router.get("/files")
async def download(request: Request) -> Response:
    service: Service = request.app.state.service
    try:
        box = _box(request, service, "read")
        pieces = box.files.stream(request.query_params["path"], user=wire.user_of(request))
        first = await anext(pieces, b"")
    except (OpenK3Error, NotRunningError, KeyError) as error:
        return failure(error, request)

    async def body() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return StreamingResponse(body(), media_type="application/octet-stream")


@router.post("/files")
async def upload(request: Request) -> Response:
    service: Service = request.app.state.service
    try:
        box = _box(request, service, "write")
        user = wire.user_of(request)
        path = request.query_params.get("path")
        if request.headers.get("content-type", "").startswith("multipart/form-data"):
            entries = await _multipart(box, request, path, user)
        else:
            if not path:
                raise InputError("path: needed for a body that names no files")
            entries = [await box.files.write(path, _body(request), user=user)]
    except (OpenK3Error, NotRunningError, TooLargeError, KeyError) as error:
        return failure(error, request)
    rows = [{"name": e.name, "path": e.path, "type": "file"} for e in entries]
    return JSONResponse(rows)


async def _multipart(
    box: LocalSandbox, request: Request, path: str | None, user: str | None
) -> list[Entry]:
    entries = []
    async with request.form(max_files=10_000, max_fields=100) as form:
        for _, part in form.multi_items():
            if isinstance(part, UploadFile):
                target = path or part.filename
                if not target:
                    raise InputError("a file of the upload has no name")
                entries.append(await box.files.write(target, _part(part), user=user))
    if not entries:
        raise InputError("the upload holds no file")
    return entries


async def _part(part: UploadFile) -> AsyncIterator[bytes]:
    while piece := await part.read(256 << 10):
        yield piece


async def _body(request: Request) -> AsyncIterator[bytes]:
    if request.headers.get("content-encoding", "identity") != "gzip":
        async for piece in request.stream():
            yield piece
        return
    decoder = zlib.decompressobj(wbits=31)
    async for piece in request.stream():
        data = piece
        while data:  # a small body may unpack to a huge one: give it on in bounded pieces
            yield decoder.decompress(data, 1 << 20)
            data = decoder.unconsumed_tail
    yield decoder.flush()


def failure(error: Exception, request: Request) -> JSONResponse:
    """`{code, message}` with the status that the SDK turns into its own classes."""
    if isinstance(error, NotRunningError):
        return wire.gone(error, request.headers.get("e2b-sandbox-id"))
    if isinstance(error, TooLargeError):
        status = 413
    elif isinstance(error, OpenK3Error):
        status = (
            401 if "token" in str(error) and isinstance(error, DeniedError) else status_of(error)
        )
    else:
        status = 400
    return JSONResponse({"code": status, "message": str(error)}, status)
