"""What every route does: read the body, know the caller, answer at once or as events."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from openk3.api.auth import given_key
from openk3.api.limits import TooLargeError
from openk3.api.openai.connection import EventStream, while_connected
from openk3.api.openai.errors import ApiError, as_api_error
from openk3.api.openai.generation import Generation, Unit
from openk3.api.openai.prepare import salt
from openk3.api.openai.requests import AnswerBody, Body
from openk3.api.openai.state import Serving

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
    """The body, for the model served here. Raises ApiError 400, 404, 408, 413 or 415."""
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
        raise ApiError(408, f"the body did not come within {limit:g} s") from None
    except TooLargeError as error:
        raise ApiError(413, str(error), "request_too_large") from None
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
    name = prefix + state.new_id()
    generation = await _begin(state, request, lambda: prepare(state, body), name, body.cache_salt)
    writing = writer(generation, body)
    if body.stream:
        return EventStream(_events(writing), state.options.stall_timeout_s, generation.close)
    try:
        return JSONResponse(await while_connected(request, writing.whole()))
    finally:
        generation.close()


async def _events(writer: Writer) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(writer.events()) as events:
            async for piece in events:
                yield piece
    except ApiError as error:
        yield writer.failed(error)


def _tenant(state: Serving, request: Request) -> str:
    """Separates the prefix caches of callers, where they have keys of their own."""
    if state.keys.count < 2:
        return ""
    return hashlib.blake2b((given_key(request.headers) or "").encode(), digest_size=8).hexdigest()


async def _begin(
    state: Serving,
    request: Request,
    prepare: Callable[[], list[Unit]],
    name: str,
    cache_salt: str | None,
) -> Generation:
    """Prepare units on a thread, admit them, wait for the first token. Raises ApiError."""

    started: list[Generation] = []

    async def work() -> None:
        units = await asyncio.to_thread(prepare)
        salted = salt(_tenant(state, request), cache_salt)
        started.append(await Generation.start(state, units, name, salted))

    try:
        await while_connected(request, work())
    except BaseException:  # cancelled as it started
        for generation in started:
            generation.close()
        raise
    return started[0]
