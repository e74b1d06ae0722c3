"""One answer while it is made: engine outputs in, deltas and an ending out."""

from dataclasses import dataclass

from openk3.engine.text_stream import Reader
from openk3.engine.types import FinishReason, Output, TokenLogprobs
from openk3.text.xtml import Delta


@dataclass(frozen=True)
class Part:
    """What one output brought."""

    index: int
    """Of the choice."""
    deltas: list[Delta]
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One for each id, if asked for."""
    finish_reason: FinishReason | None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first ids, if asked for."""


class Choice:
    """One of the n answers to a prompt."""

    def __init__(self, index: int, request_id: str, reader: Reader) -> None:
        self.index, self.request_id, self.reader = index, request_id, reader
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self.num_ids = 0
        """Generated so far."""

    def take(self, output: Output) -> Part:
        """Read an output. When a stop string ends the choice, its request must be aborted."""
        ids, reason = output.new_ids, output.finish_reason
        self.num_ids += len(ids)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        deltas = self.reader.feed(ids)
        if reason is not None:
            deltas += self.reader.finish()
        if self.reader.stop is not None and reason != "error":
            reason = "stop"
        self.finish_reason = reason
        told = output.logprobs or (), reason, output.error, output.prompt_logprobs or ()
        return Part(self.index, deltas, ids, *told)
