"""A progress bar for finite chores, drawn only on a terminal and at most ten times a second."""

import sys
from types import TracebackType
from typing import TextIO

from openk3._io import Clock, SystemClock
from openk3.obs.console import duration


class Progress:
    """with Progress(total_bytes, "hashing", "B") as bar: bar.advance(len(piece))"""

    WIDTH = 30

    def __init__(
        self,
        total: float,
        label: str,
        unit: str = "",
        *,
        stream: TextIO | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.total, self.label, self.unit = total, label, unit
        self.done = 0.0
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock or SystemClock()
        self._start = self._clock.now()
        self._drawn = float("-inf")
        self._live = self._stream.isatty()

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more of the total."""
        self.done += amount
        if self._live and self._clock.now() - self._drawn >= 0.1:
            self._draw()

    def _draw(self) -> None:
        self._drawn = self._clock.now()
        share = min(self.done / self.total, 1.0) if self.total else 1.0
        filled = round(share * self.WIDTH)
        spent = self._drawn - self._start
        left = duration(spent / share - spent) if share > 0 else "?"
        bar = "█" * filled + "░" * (self.WIDTH - filled)
        amount = f"{_short(self.done)}/{_short(self.total)} {self.unit}".rstrip()
        self._stream.write(f"\r\x1b[K{self.label} {bar} {share:4.0%} {amount} eta {left}")
        self._stream.flush()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._draw()
            self._stream.write("\n")


def _short(amount: float) -> str:
    for unit in ("", "k", "M", "G"):
        if amount < 1000:
            return f"{amount:.3g}{unit}"
        amount /= 1000
    return f"{amount:.3g}T"
