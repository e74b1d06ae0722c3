"""What every route does: read the body, know the caller, answer at once or as events."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from openk3.api.auth import given_key
from openk3.api.limits import TooLargeError
from openk3.api.openai.connection import EventStream, while_connected
from openk3.api.openai.errors import ApiError, as_api_error
from openk3.api.openai.generation import Generation, Unit
from openk3.api.openai.requests import AnswerBody, Body
from openk3.api.openai.state import Serving
from openk3.errors import OpenK3Error

B = TypeVar("B", bound=Body)
A = TypeVar("A", bound=AnswerBody)


class Writer(Protocol):
    """Writes a generation in the shape of an endpoint."""

    async def whole(self) -> dict[str, Any]:
        """The answer as one object. Raises ApiError if a choice failed."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. Raises ApiError if a choice failed."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream in which a choice failed."""
        ...


def state_of(request: Request) -> Serving:
    """The server's state."""
    return request.app.state.serving


async def read_body(request: Request, kind: type[B]) -> B:
    """The body, for the model served here. Raises ApiError 400, 404, 408, 413, 415 or 499."""
    state = state_of(request)
    limit = state.options.body_timeout_s
    given = request.headers.get("content-type", "application/json")
    if given.partition(";")[0].strip().lower() != "application/json":
        # a form could be sent by any web page
        raise ApiError(415, f"content-type is {given!r:.80}; send application/json")
    try:
        async with asyncio.timeout(limit):
            sent = await request.body()
        body = kind.model_validate_json(sent)
    except ValidationError as error:
        raise as_api_error(error) from None
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {limit:g} s", headers={"connection": "close"}
        ) from None
    except TooLargeError as error:
        raise ApiError(413, str(error), "request_too_large") from None
    except ClientDisconnect:
        raise ApiError(499, "the caller went away") from None
    state.require_model(body.model)
    return body


async def answer(
    request: Request,
    kind: type[A],
    prepare: Callable[[Serving, A], list[Unit]],
    writer: Callable[[Generation, A], Writer],
    prefix: str,
) -> Response:
    """The whole of a route that generates. Raises ApiError.

    Args:
        kind: the model of the body.
        prepare: the choices that a body asks for; called on a thread.
        writer: writes what comes of them.
        prefix: of the answer's id.
    """
    state = state_of(request)
    body = await read_body(request, kind)
    with ExitStack() as running:  # ends what runs, however this ends

        async def start() -> Generation:
            units = await asyncio.to_thread(prepare, state, body)
            name, salt = prefix + state.new_id(), _salt(state, request, body.cache_salt)
            generation = await Generation.start(state, units, name, salt)
            running.callback(generation.close)
            return generation

        writing = writer(await while_connected(request, start()), body)
        if body.stream:
            on_end = running.pop_all().close
            return EventStream(_events(writing), state.options.stall_timeout_s, on_end)
        return JSONResponse(await while_connected(request, writing.whole()))


async def _events(writer: Writer) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(writer.events()) as events:
            async for piece in events:
                yield piece
    except ApiError as error:
        yield writer.failed(error)
    except OpenK3Error as error:
        yield writer.failed(as_api_error(error))


def _salt(state: Serving, request: Request, given: str | None) -> str:
    """What separates prefix caches: who asks, if callers have keys of their own, and a salt."""
    tenant = ""
    if state.keys.count > 1:
        key = given_key(request.headers) or ""
        tenant = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return f"{tenant}/{given or ''}" if tenant or given else ""
