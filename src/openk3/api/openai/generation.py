"""From admitted requests to the parts of their answers: time limits, stops, counts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from openk3.api.openai.errors import ApiError, as_api_error
from openk3.api.openai.state import Serving
from openk3.engine.chat import Prompt
from openk3.engine.choice import Choice, Part
from openk3.engine.service import Stream
from openk3.engine.text_stream import Reader
from openk3.engine.types import Constraint, Output, Request, SamplingParams
from openk3.errors import OpenK3Error


@dataclass(frozen=True)
class Unit:
    """One choice that is asked for."""

    prompt: Prompt
    params: SamplingParams
    reader: Reader
    constraint: Constraint | None = None


@dataclass(frozen=True)
class Usage:
    """Token counts of a whole answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int

    def openai(self) -> dict[str, object]:
        """As OpenAI writes it; cached tokens are always there."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class Generation:
    """Some choices while they are made. Use `start`, iterate once, and `close` in any case."""

    def __init__(self, state: Serving, units: Sequence[Unit], name: str) -> None:
        self.state, self.units, self.id = state, units, name
        self.choices = [Choice(i, f"{name}-{i}", unit.reader) for i, unit in enumerate(units)]
        self._by_id = {choice.request_id: choice for choice in self.choices}
        self._stream: Stream | None = None
        self._began = state.clock.now()
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._waiting: list[Output] = []
        self._closed = False

    @classmethod
    async def start(
        cls, state: Serving, units: Sequence[Unit], name: str, salt: str = ""
    ) -> "Generation":
        """Admit the requests and wait for the first token, so that refusals are plain answers.

        Raises ApiError.
        """
        new = cls(state, units, name)
        requests = [
            Request(choice.request_id, unit.prompt.ids, unit.params, salt, unit.prompt.media,
                    unit.constraint)
            for choice, unit in zip(new.choices, units, strict=True)
        ]  # fmt: skip
        try:
            new._stream = await state.service.submit(requests)
        except OpenK3Error as error:
            raise as_api_error(error) from None
        for prompt in new._prompts():
            state.metrics.started(prompt.num_tokens)
        with ExitStack() as undo:
            undo.callback(new.close)
            await new._wait_for_first()
            undo.pop_all()
        return new

    async def _wait_for_first(self) -> None:
        assert self._stream is not None, "start() submits first"
        limit = self.state.options.queue_timeout_s
        try:
            async with asyncio.timeout(limit):
                while not any(output.new_ids for output in self._waiting):
                    self._waiting += await anext(self._stream)
        except StopAsyncIteration:
            pass
        except TimeoutError:
            raise ApiError(
                503, f"no token within {limit:g} s: the server is overloaded", "overloaded",
                retry_after_s=5.0,
            ) from None  # fmt: skip
        for output in self._waiting:
            if output.finish_reason == "error":
                raise _failed(output.error)
            if output.finish_reason == "abort" and not output.new_ids:
                raise ApiError(
                    503, "the server is shutting down; send this to another one", "shutting_down",
                    retry_after_s=1.0,
                )  # fmt: skip

    async def parts(self) -> AsyncIterator[Part]:
        """The parts of all choices, until each has ended. Raises ApiError when one fails."""
        assert self._stream is not None, "made by start()"
        outputs, self._waiting = self._waiting, []
        for output in outputs:
            if part := self._take(output):
                yield part
        while (outputs := await self._next()) is not None:
            for output in outputs:
                if part := self._take(output):
                    yield part

    async def _next(self) -> list[Output] | None:
        """More outputs; at the time limit, an end for all that still run; None when all ended."""
        assert self._stream is not None, "made by start()"
        left = self.state.options.time_limit_s - (self.state.clock.now() - self._began)
        try:
            async with asyncio.timeout(max(left, 0)):
                return await anext(self._stream)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            self._stream.close()
            late = [choice for choice in self.choices if choice.finish_reason is None]
            return [Output(choice.request_id, (), "abort") for choice in late]

    def _take(self, output: Output) -> Part | None:
        choice = self._by_id[output.request_id]
        if choice.finish_reason is not None:
            return None
        part = choice.take(output)
        now = self.state.clock.now()
        self._count(choice, part, now)
        if part.finish_reason is not None:
            assert self._stream is not None, "made by start()"
            self._stream.abort(choice.request_id)  # does nothing unless a stop string ended it
        if part.finish_reason == "error":
            raise _failed(part.error)
        return part

    def _count(self, choice: Choice, part: Part, now: float) -> None:
        metrics, model = self.state.metrics, self.state.model
        metrics.generated.labels(model).inc(len(part.ids))
        if part.ids and choice.index not in self._first:
            self._first[choice.index] = now
            metrics.first.labels(model).observe(now - self._began)
        elif part.ids:
            metrics.between.labels(model).observe((now - self._last[choice.index]) / len(part.ids))
        self._last[choice.index] = now
        if part.finish_reason is not None:
            first = self._first.get(choice.index, now)
            reason = part.finish_reason
            metrics.ended(reason, choice.num_ids, now - self._began, now - first)

    def close(self) -> None:
        """Abort what still runs. A normal end leaves nothing to abort; nor does a second call."""
        if self._stream is None or self._closed:
            return
        self._closed = True
        self._stream.close()
        ends = {output.request_id: output.finish_reason for output in self._waiting}
        for choice in self.choices:
            if choice.finish_reason is None:  # its caller left, or never got a first token
                reason = ends.get(choice.request_id) or "abort"
                self.state.metrics.success.labels(self.state.model, reason).inc()

    def _prompts(self) -> list[Prompt]:
        """Each prompt once, however many choices it has."""
        return list({id(unit.prompt): unit.prompt for unit in self.units}.values())

    def usage(self) -> Usage:
        """Token counts so far; a prompt's cached tokens are those of its first choice."""
        first: dict[int, Choice] = {}
        for unit, choice in zip(self.units, self.choices, strict=True):
            first.setdefault(id(unit.prompt), choice)
        sizes = [prompt.num_tokens - prompt.num_pending for prompt in self._prompts()]
        cached = [choice.cached_tokens for choice in first.values()]
        return Usage(
            prompt_tokens=sum(sizes),
            completion_tokens=sum(choice.num_ids for choice in self.choices),
            cached_tokens=sum(map(min, cached, sizes)),
            reasoning_tokens=sum(unit.reader.num_reasoning for unit in self.units),
        )


def _failed(reason: str | None) -> ApiError:
    return ApiError(500, f"generation failed: {reason}", "generation_failed")
