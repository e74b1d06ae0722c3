"""Guesses for the next tokens of a sequence: what followed the last time it said the same.

Prompt lookup: if the last GRAMS tokens (the longest that can be had) occurred before in the
prompt or the output, what came after them is the draft. Verification by the runner makes a wrong
guess cost time only. A draft layer's guesses are made by the runner (`engine.layer_drafts`), just
before it verifies them: their number alone is decided here.
"""

from typing import TYPE_CHECKING

from openk3.engine.plan import UNKNOWN
from openk3.engine.types import EngineConfig

if TYPE_CHECKING:
    from openk3.engine.sequence import Sequence

GRAMS = (4, 2)
"""Sizes, the longest first."""
LOOKBACK = 8192
"""Tokens of a prompt that are searched, from its end."""


def propose(seq: "Sequence", config: EngineConfig, limit: int) -> tuple[int, ...]:
    """Up to `limit` guesses. None for a request with a grammar: its state cannot be taken back."""
    if limit <= 0 or seq.request.constraint is not None:
        return ()
    if config.draft == "mtp":
        return (UNKNOWN,) * limit
    return seq.grams.guess(seq.ids, limit)


class Grams:
    """Where each n-gram of a growing list of ids was seen last; grows with the list."""

    __slots__ = ("seen", "upto")

    def __init__(self) -> None:
        self.seen: dict[tuple[int, ...], int] = {}
        self.upto = 0
        """Ends of n-grams before this position are in `seen`."""

    def guess(self, ids: list[int], limit: int) -> tuple[int, ...]:
        """What followed the latest earlier occurrence of the longest known end of `ids`."""
        for end in range(max(self.upto, GRAMS[-1], len(ids) - LOOKBACK), len(ids)):
            for size in GRAMS:
                self.seen[tuple(ids[max(0, end - size) : end])] = end
        self.upto = len(ids)
        for size in GRAMS:
            at = self.seen.get(tuple(ids[-size:]))
            if at is not None:
                return tuple(ids[at : at + limit])
        return ()
