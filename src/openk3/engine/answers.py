"""Answers of an engine, made together: requests in as its queue takes them, outputs to texts."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openk3.engine.choice import Choice
from openk3.engine.interrupts import held_back
from openk3.engine.service import SteppedEngine
from openk3.engine.types import FinishReason, Output, Request, TokenLogprobs
from openk3.errors import BackendError, LimitError
from openk3.text.xtml import Accumulator, Delta

OnDelta = Callable[[int, Delta], object]


@dataclass
class Answer:
    """One answer to one prompt."""

    ids: list[int] = field(default_factory=list)
    """Generated, the one that ended it included."""
    text: str = ""
    """Of a continuation; of a conversation, the answer without its thoughts and calls."""
    message: dict[str, Any] = field(default_factory=dict)
    """Of a conversation: content, reasoning_content, tool_calls, as `xtml.render` takes it back."""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each id, if asked for."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, if asked for."""
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Making:
    """One answer while it is made."""

    def __init__(
        self, request: Request, choice: Choice, prompt_tokens: int, on_delta: OnDelta | None
    ) -> None:
        self.request, self.choice = request, choice
        self.answer = Answer(prompt_tokens=prompt_tokens)
        self._message = Accumulator()
        self._on_delta = on_delta

    def take(self, output: Output) -> None:
        """Read an output. Raises BackendError if the engine gave the request up."""
        part, answer = self.choice.take(output), self.answer
        if part.finish_reason == "error":
            raise BackendError(f"generation failed: {part.error}")
        answer.ids += part.ids
        answer.logprobs += part.logprobs
        answer.prompt_logprobs += part.prompt_logprobs
        answer.finish_reason = part.finish_reason
        answer.cached_tokens = self.choice.cached_tokens
        for delta in part.deltas:
            self._message.add(delta)
            if self._on_delta:
                self._on_delta(self.choice.index, delta)
        if part.finish_reason is not None:
            answer.message = self._message.message()
            answer.text = answer.message["content"]


def make_all(engine: SteppedEngine, makings: Sequence[Making]) -> None:
    """Make them, in order as far as the engine's queue has room. What breaks off aborts the rest.

    Raises what the engine's `add` raises, and BackendError if it gave a request up.
    """
    waiting, running = deque(makings), {}
    try:
        while waiting or running:
            with held_back():
                _start(engine, waiting, running)
                outputs = engine.step()
            for output in outputs:
                making = running.get(output.request_id)
                if making is None:
                    continue
                making.take(output)
                if making.answer.finish_reason is not None:
                    del running[output.request_id]
                    if output.finish_reason is None:  # a stop string has ended it
                        engine.abort(output.request_id)
    finally:
        with held_back():
            for request_id in running:
                engine.abort(request_id)


def _start(engine: SteppedEngine, waiting: deque[Making], running: dict[str, Making]) -> None:
    """Start what the engine's queue has room for."""
    while waiting:
        request = waiting[0].request
        try:
            engine.add(request)
        except LimitError:
            if not running:
                raise
            return
        running[request.id] = waiting.popleft()
