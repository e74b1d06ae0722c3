"""An answer as blocks, for the two APIs that have such: thoughts, texts and calls, in order."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from openk3.api.openai.generation import Generation
from openk3.text.xtml import Delta


@dataclass
class Block:
    """A run of deltas of one channel, or one call."""

    kind: Literal["thought", "text", "call"]
    id: str
    """Never seen before, whatever a conversation's history holds."""
    tool: str = ""
    """That a call names."""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What it holds so far; of a call, its arguments."""
        return "".join(self.texts)


class Blocks(list[Block]):
    """Grows with the deltas of one choice."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__()
        self._new_id = new_id
        self._open: tuple[str, int] | None = None

    def take(self, delta: Delta) -> bool:
        """Add a delta; whether it began a block."""
        if delta.kind in ("call", "arguments"):
            kind, number = "call", delta.index
        else:
            kind, number = ("thought" if delta.kind == "reasoning" else "text"), 0
        is_new = self._open != (kind, number)
        if is_new:
            self._open = kind, number
            self.append(Block(kind, self._new_id(), delta.text if kind == "call" else ""))
        if delta.kind != "call":
            self[-1].texts.append(delta.text)
        return is_new

    async def take_all(self, generation: Generation) -> None:
        """The blocks of a whole answer. Raises ApiError if generation failed."""
        async for part in generation.parts():
            for delta in part.deltas:
                if delta.kind == "answer":  # what seemed a thought was the answer
                    self.clear()
                    self._open = None
                self.take(delta)
