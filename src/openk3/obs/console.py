"""The line a run prints for each step: fixed fields, greppable, with the time left.

    step 120/1000 12.0% | loss 2.3456 | bpb 1.2345 | lr 3.00e-03 | gnorm 0.91 | 3,412 tok/s | ...

The first steps of an attempt (compilation, caches, allocator) do not count towards speed.
"""

import statistics
from collections import deque
from collections.abc import Callable

from openk3.obs import log
from openk3.obs.rows import StepRow


class Console:
    """Formats and emits step lines."""

    def __init__(
        self,
        total_steps: int,
        *,
        every: int = 1,
        warmup_steps: int = 3,
        window: int = 50,
        emit: Callable[[str], None] | None = None,
    ) -> None:
        """A line each `every` steps; the first, the last and bad steps always get one.

        Speed and time left are those of the last `window` steps after `warmup_steps`.
        """
        self.total_steps = total_steps
        self.every = every
        self._skip = warmup_steps
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=window)
        self._last: StepRow | None = None
        self._emit = emit or log.get("train").info

    def step(self, row: StepRow) -> None:
        """Take note of a step, and say it if it is its turn."""
        first = self._last is None
        self._note(row)
        if first or row.bad or row.step % self.every == 0 or row.step == self.total_steps:
            self._emit(self.line(row))

    def _note(self, row: StepRow) -> None:
        if self._skip > 0:
            self._skip -= 1
        elif self._last is not None:
            wall = max(row.seconds - self._last.seconds, row.step_seconds)
            self._steps.append((row.tokens - self._last.tokens, row.step_seconds, wall))
        self._last = row

    @property
    def tokens_per_s(self) -> float | None:
        """Speed over the window, evaluation and checkpoints left out; None during warm-up."""
        spent = sum(step for _, step, _ in self._steps)
        return sum(tokens for tokens, _, _ in self._steps) / spent if spent > 0 else None

    def eta(self, step: int) -> float | None:
        """Seconds to the last step, evaluation and checkpoints included; None during warm-up."""
        if not self._steps:
            return None
        return (self.total_steps - step) * statistics.fmean(wall for _, _, wall in self._steps)

    def line(self, row: StepRow) -> str:
        """The line of one step."""
        speed = self.tokens_per_s if self.tokens_per_s is not None else row.tokens_per_s
        parts = [
            f"step {row.step}/{self.total_steps} {row.step / max(self.total_steps, 1):.1%}",
            f"loss {row.loss:.4f}",
            f"bpb {row.bits_per_byte:.4f}" if row.bits_per_byte is not None else "",
            f"lr {row.lr:.2e}",
            f"gnorm {row.grad_norm:.2f}",
            f"{speed:,.0f} tok/s",
            f"mfu {row.mfu:.1%}" if row.mfu is not None else "",
            memory(row.memory_bytes, row.memory_total_bytes),
            f"eta {duration(self.eta(row.step))}",
            f"SKIPPED: {row.bad}" if row.bad else "",
        ]
        return " | ".join(part for part in parts if part)


def memory(used: int | None, total: int | None) -> str:
    """`mem 1.20 GiB 15%`, without the share where the total is unknown, or nothing."""
    if used is None:
        return ""
    share = f" {used / total:.0%}" if total else ""
    return f"mem {used / 2**30:.2f} GiB{share}"


def duration(seconds: float | None) -> str:
    """`4:07`, `1:02:03`, `2d 03:04:05`, or `?`."""
    if seconds is None:
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
