"""What every route does first and last: read the body, know the caller, answer or stream."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from openk3.api.auth import given_key
from openk3.api.limits import TooLargeError
from openk3.api.openai.connection import EventStream, event, while_connected
from openk3.api.openai.errors import ApiError, as_api_error
from openk3.api.openai.generation import Generation, Unit
from openk3.api.openai.prepare import salt
from openk3.api.openai.state import Serving

B = TypeVar("B", bound=BaseModel)


async def read_body(request: Request, kind: type[B]) -> B:
    """The body as its model. Raises ApiError 400, 408, 413 or 415."""
    limit = request.app.state.serving.options.body_timeout_s
    given = request.headers.get("content-type", "application/json")
    if given.partition(";")[0].strip().lower() != "application/json":
        # a form could be sent by any web page
        raise ApiError(415, f"content-type is {given!r:.80}; send application/json")
    try:
        async with asyncio.timeout(limit):
            body = await request.body()
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise as_api_error(error) from None
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {limit:g} s") from None
    except TooLargeError as error:
        raise ApiError(413, str(error), "request_too_large") from None


def tenant(state: Serving, request: Request) -> str:
    """Separates the prefix caches of callers, where they have keys of their own."""
    if state.keys.count < 2:
        return ""
    return hashlib.blake2b((given_key(request.headers) or "").encode(), digest_size=8).hexdigest()


async def begin(
    state: Serving,
    request: Request,
    prepare: Callable[[], list[Unit]],
    name: str,
    cache_salt: str | None = None,
) -> Generation:
    """Prepare units on a thread, admit them, wait for the first token. Raises ApiError."""

    started: list[Generation] = []

    async def work() -> None:
        units = await asyncio.to_thread(prepare)
        salted = salt(tenant(state, request), cache_salt)
        started.append(await Generation.start(state, units, name, salted))

    try:
        await while_connected(request, work())
    except BaseException:  # cancelled as it started
        for generation in started:
            generation.close()
        raise
    return started[0]


def stream(
    state: Serving, generation: Generation, events: AsyncGenerator[bytes, None]
) -> EventStream:
    """The answer of events; what they work on ends with it."""
    return EventStream(events, state.options.stall_timeout_s, generation.close)


def failed(message: str | None) -> bytes:
    """The event that tells of a failure in mid-stream."""
    return event(ApiError(500, f"generation failed: {message}", "generation_failed").body())
