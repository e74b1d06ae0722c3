"""What a run says: metrics rows, console lines, events. Silent on every process but the first."""

from typing import Any

import torch

from openk3.obs import log
from openk3.obs.console import Console
from openk3.obs.rows import EvalRow, EventRow, Row, SampleRow, StepRow
from openk3.obs.run import RunFolder
from openk3.train.evaluate import Evaluation
from openk3.train.memory import memory_bytes, memory_total
from openk3.train.step import StepResult


class Journal:
    """Writes into `run`; None writes nothing. `axes` are the x-axes every row carries."""

    def __init__(
        self,
        total_steps: int,
        device: torch.device,
        flops_per_token: float,
        peak_flops: float | None = None,
    ) -> None:
        """flops_per_token: forward and backward; peak_flops: of all devices, where known."""
        self.run: RunFolder | None = None
        self.flops_per_token = flops_per_token
        self._device, self._peak = device, peak_flops
        self._console = Console(total_steps)

    def write(self, row: Row) -> None:
        """Append one row."""
        if self.run is not None:
            self.run.metrics.write(row)

    def step(self, result: StepResult, lr: float, seconds: float, axes: dict[str, Any]) -> None:
        """The row and the line of a step."""
        if self.run is None:
            return
        speed = result.num_positions / seconds
        row = StepRow(
            loss=result.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            step_seconds=seconds,
            tokens_per_s=speed,
            bits_per_byte=_bits_per_byte(result),
            mfu=speed * self.flops_per_token / self._peak if self._peak else None,
            memory_bytes=memory_bytes(self._device),
            memory_total_bytes=memory_total(self._device),
            max_logit=result.max_logit,
            clipped_heads=result.clipped_heads,
            bad=result.bad,
            **axes,
        )
        self.write(row)
        self._console.step(row)
        if result.bad:
            self.event("skip", result.bad, axes)

    def evaluation(self, split: str, found: Evaluation, axes: dict[str, Any]) -> None:
        """The row and the line of an evaluation."""
        row = EvalRow(
            split=split,
            loss=found.loss,
            bits_per_byte=found.bits_per_byte,
            num_tokens=found.num_tokens,
            num_bytes=found.num_bytes,
            exact=found.exact,
            **axes,
        )
        self.write(row)
        captions = "" if found.exact is None else f", {found.exact:.1%} of captions right"
        self.say(
            f"eval {split}: {found.bits_per_byte:.4f} bits/byte ({found.num_bytes:,} bytes)"
            + captions
        )

    def sample(self, prompt: str, text: str, axes: dict[str, Any]) -> None:
        """What the model wrote."""
        self.write(SampleRow(prompt=prompt, text=text, **axes))

    def event(self, what: str, detail: str, axes: dict[str, Any]) -> None:
        """Something that happened once."""
        self.write(EventRow(what=what, detail=detail, **axes))

    def say(self, line: str) -> None:
        """One line for people."""
        if self.run is not None:
            log.get("train").info(line)


def _bits_per_byte(result: StepResult) -> float | None:
    if not result.num_bytes:
        return None
    nats = result.loss * result.num_tokens
    return Evaluation(nats, result.num_tokens, result.num_bytes).bits_per_byte
