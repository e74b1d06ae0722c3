"""The arguments of one decoding step, checked once, as every backend of `decode` receives them.

Legend: B rows, T new tokens, H heads, D = K = V head width, W = 4 taps, S slots, P window capacity.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from openk3.errors import InputError
from openk3.ops.checks import check_tensor, readable
from openk3.ops.kda.call import check_lower_bound

TAPS = 4


class Pending(NamedTuple):
    """Projected inputs of the last window of W sequences, before the convolution."""

    q: Tensor
    """[W, P, H, D]"""
    k: Tensor
    """[W, P, H, D]"""
    v: Tensor
    """[W, P, H, D]"""
    g: Tensor
    """[W, P, H, D] decay logits"""
    beta: Tensor
    """[W, P, H] logits"""


class Step(NamedTuple):
    """The arguments of one call."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    """q, k, v, g [B,T,H,D] and beta [B,T,H]"""
    gate: Tensor
    """[B,T,H,D] output gate logits"""
    taps: tuple[Tensor, ...]
    """[W, H, D] each, of the convolutions of q, k and v; views of however they are stored"""
    conv_state: Tensor
    """[S, 3, W, H, D]"""
    state: Tensor
    """[S, H, K, V] float32"""
    slots: Tensor
    """[B]"""
    A_log: Tensor
    """[H]"""
    dt_bias: Tensor
    """[H * D]"""
    lower_bound: float
    scale: float
    norm_weight: Tensor
    """[D]"""
    eps: float
    pending: Pending | None
    accepted: Tensor | None
    """[B]"""
    windows: Tensor
    """[B], rows of `pending`"""
    advance: Tensor | None
    """[B]"""

    def dense(self) -> "Step":
        """The same, small tensors contiguous and integers 32 bits wide, as kernels read them."""
        return self._replace(
            A_log=self.A_log.contiguous(),
            dt_bias=self.dt_bias.contiguous(),
            norm_weight=self.norm_weight.contiguous(),
            slots=self.slots.int().contiguous(),
            windows=self.windows.int().contiguous(),
            accepted=None if self.accepted is None else self.accepted.int().contiguous(),
            advance=None if self.advance is None else self.advance.int().contiguous(),
        )

    def check(self) -> None:
        """Raises InputError on a shape, dtype, device or number that does not fit."""
        q = self.inputs[0]
        if self.pending is None and self.advance is not None:
            raise InputError(
                "advance is for rows with a pending window; others advance by every token"
            )
        for name, x, shape in self._expected():
            check_tensor(name, x, shape, q.device)
        numbers = {"slots": self.slots, "windows": self.windows}
        numbers |= {"accepted": self.accepted} if self.pending is not None else {}
        numbers |= {"advance": self.advance} if self.advance is not None else {}
        for name, x in numbers.items():
            check_tensor(name, x, q.shape[:1], q.device, kind="integer")
        for name, pool in (("state", self.state), ("conv_state", self.conv_state)):
            if pool.shape[0] and not pool[0].is_contiguous():
                raise InputError(f"{name} is written in place: each slot must be contiguous")
        if self.state.dtype != torch.float32:
            raise InputError(f"state must be float32, not {self.state.dtype}")
        check_lower_bound(self.lower_bound)
        self._check_window()
        if readable(self.slots):
            self._check_values()

    def _expected(self) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
        """Name, tensor and shape of everything of floating point."""
        shape = self.inputs[0].shape
        heads, width = shape[2:]
        yield from ((n, x, shape) for n, x in zip("qkvg", self.inputs[:4], strict=True))
        yield "beta", self.inputs[4], shape[:3]
        yield "gate", self.gate, shape
        for i, w in enumerate(self.taps):
            yield f"conv_weight[{i}]", w, (TAPS, heads, width)
        num = self.state.shape[0]
        yield "conv_state", self.conv_state, (num, 3, TAPS, heads, width)
        yield "state", self.state, (num, heads, width, width)
        yield "A_log", self.A_log, (heads,)
        yield "dt_bias", self.dt_bias, (heads * width,)
        yield "norm_weight", self.norm_weight, (width,)

    def _check_window(self) -> None:
        if (self.pending is None) != (self.accepted is None):
            raise InputError("pending and accepted belong together; one of them is missing")
        if self.pending is None:
            return
        _, tokens, *heads_width = self.inputs[0].shape
        many, capacity = self.pending.q.shape[:2]
        if tokens > capacity:
            raise InputError(f"{tokens} new tokens do not fit a pending window of {capacity}")
        for name, x in self.pending._asdict().items():
            shape = (many, capacity, *heads_width[: 1 if name == "beta" else 2])
            check_tensor(f"pending.{name}", x, shape, self.inputs[0].device)
            if not x.is_contiguous():
                raise InputError(f"pending.{name} is written in place: it must be contiguous")

    def _check_values(self) -> None:
        """Slots and counts of the rows that are no padding."""
        real = [b for b, slot in enumerate(self.slots.tolist()) if slot >= 0]

        def check(name: str, numbers: Tensor | None, stop: int, *, distinct: bool = False) -> None:
            every = [] if numbers is None else numbers.tolist()
            values = [every[b] for b in real if every]
            wrong = [x for x in values if not 0 <= x < stop]
            if wrong:
                raise InputError(f"{name} must lie in [0, {stop}); one is {wrong[0]}")
            if distinct and len(set(values)) < len(values):
                raise InputError(f"{name} must be distinct; they are {values}")

        check("slots", self.slots, self.state.shape[0], distinct=True)
        if self.pending is not None:
            many, capacity = self.pending.q.shape[:2]
            check("windows", self.windows, many, distinct=True)
            check("accepted", self.accepted, capacity + 1)
            check("advance", self.advance, self.inputs[0].shape[1] + 1)
