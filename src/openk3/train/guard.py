"""Which steps are too bad to apply: losses that are not finite, or that jump."""

import math
from typing import Any

from openk3.errors import DivergedError

WARMUP = 20
"""Good steps before a jump can be told from the noise of a beginning."""
DECAY = 0.98
"""Memory of the running mean, about 50 steps."""


class Guard:
    """Judges each step by its loss and gradient norm; its whole memory is in the checkpoint."""

    def __init__(self, spike_nats: float, max_bad_steps: int) -> None:
        self.spike_nats, self.max_bad_steps = spike_nats, max_bad_steps
        self.mean = 0.0
        """Running mean of good losses, nats per token."""
        self.num_good = 0
        """Steps that were applied."""
        self.num_bad = 0
        """Steps that were skipped."""
        self.bad_in_a_row = 0
        """Of them, since the last good one."""

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """Why the step must be skipped, or None to apply it."""
        reason = self._reason(loss, grad_norm)
        if reason is None:
            weight = max(1.0 - DECAY, 1.0 / (self.num_good + 1))
            self.mean += weight * (loss - self.mean)
            self.num_good += 1
            self.bad_in_a_row = 0
        else:
            self.num_bad += 1
            self.bad_in_a_row += 1
        return reason

    def check(self) -> None:
        """Raise DivergedError after too many bad steps in a row."""
        if self.bad_in_a_row >= self.max_bad_steps:
            raise DivergedError(
                f"{self.bad_in_a_row} steps in a row were skipped (train.max_bad_steps is "
                f"{self.max_bad_steps}); the last checkpoint is from before them. Lower optim.lr, "
                "or look at the data of those steps"
            )

    def _reason(self, loss: float, grad_norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"gradient norm is {grad_norm}"
        if self.num_good >= WARMUP and loss > self.mean + self.spike_nats:
            return f"loss {loss:.3f} jumped from a mean of {self.mean:.3f}"
        return None

    def state(self) -> dict[str, Any]:
        """JSON-ready; floats survive exactly."""
        return {k: getattr(self, k) for k in ("mean", "num_good", "num_bad", "bad_in_a_row")}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take a saved `state()` over."""
        for key in self.state():
            setattr(self, key, state[key])
