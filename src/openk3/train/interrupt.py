"""Ctrl-C and termination as a wish that the loop grants between two steps."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE_S = 1.0


class StopWish:
    """Whether someone asked the run to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals() -> Iterator[StopWish]:
    """Turn SIGINT or SIGTERM into a wish; a SIGINT a second later interrupts at once.

    A launcher may pass the terminal's Ctrl-C on to processes that have had it already; such a
    repetition comes within moments and is no second wish.
    """
    wish = StopWish()
    asked = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        now = time.monotonic()
        if wish and number == signal.SIGINT and now - asked > PATIENCE_S:
            raise KeyboardInterrupt
        if not wish:
            asked = now
        wish.signal = signal.Signals(number)

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
