"""Per-Head Muon (K3 report §2.5): momentum, orthogonalised per head block, as the update.

    M <- mu M + G;   U = mu M + G (Nesterov);   W <- W - lr (0.2 sqrt(max(r, c)) NS(U) + wd W)

for every block of r rows and c columns. The factor makes the root-mean-square of an update 0.2, as
AdamW's, so both share one learning rate; it uses the block's own dimensions, not the matrix's.

Blocks of equal shape from all parameters go through Newton-Schulz as one batch: small models would
otherwise spend their time launching tiny products.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.optim.newton_schulz import orthogonalize

CPU_BATCH_ELEMENTS = 1 << 17
"""Elements of one Newton-Schulz batch on a CPU: its three matrices then stay in the cache."""
GPU_BATCH_ELEMENTS = 1 << 27
"""On a GPU: large enough to fill it, small enough to bound the scratch memory."""


@dataclass(frozen=True)
class MuonParameter:
    """A float32 master matrix [rows, columns] or stack [experts, rows, columns], and its cut."""

    name: str
    weight: Tensor
    rows: tuple[int, ...]
    """Block heights, repeated down the rows."""


@dataclass(frozen=True)
class _Slot:
    """The blocks of one height of one parameter."""

    parameter: int
    within: slice
    """Of the rows of all its matrices, those that are cut into whole blocks."""
    start: int
    height: int
    period: int

    def view(self, matrix: Tensor) -> Tensor:
        """The blocks as a view [N, height, columns] of `matrix`."""
        blocks = matrix.flatten(0, -2)[self.within].unflatten(0, (-1, self.period))
        return blocks[:, self.start : self.start + self.height]


class Muon:
    """The optimizer of all matrices that groups.py gives it."""

    def __init__(
        self,
        parameters: Sequence[MuonParameter],
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        steps: int = 5,
        dtype: torch.dtype = torch.float32,
        within: Sequence[slice] | None = None,
    ) -> None:
        """dtype: of the Newton-Schulz products; float32 on CPUs, bfloat16 is enough on GPUs.
        within: rows of each parameter that `step` orthogonalises itself; None for all."""
        self.names = [p.name for p in parameters]
        self.weights = [p.weight for p in parameters]
        self.momentum, self.weight_decay, self.steps, self.dtype = (
            momentum,
            weight_decay,
            steps,
            dtype,
        )
        self.buffers = [torch.zeros_like(w) for w in self.weights]
        on_cpu = all(w.device.type == "cpu" for w in self.weights)
        self._limit = CPU_BATCH_ELEMENTS if on_cpu else GPU_BATCH_ELEMENTS
        self._batches = list(
            _plan(parameters, within or [slice(None)] * len(parameters), self._limit)
        )

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from `.grad` of every weight (None counts as zero), at learning rate `lr`."""
        self._apply(self._advance(lr), lr)

    def _advance(self, lr: float) -> list[Tensor]:
        """Momentum and decay; returns what is to be orthogonalised."""
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights]
        torch._foreach_mul_(self.buffers, self.momentum)
        torch._foreach_add_(self.buffers, grads)
        torch._foreach_mul_(self.weights, 1.0 - lr * self.weight_decay)
        return list(torch._foreach_add(grads, self.buffers, alpha=self.momentum))

    def _apply(self, updates: Sequence[Tensor], lr: float) -> None:
        for batch in self._batches:
            pieces = self._orthogonal([slot.view(updates[slot.parameter]) for slot in batch])
            for slot, piece in zip(batch, pieces, strict=True):
                target = slot.view(self.weights[slot.parameter])
                target.add_(piece.to(target.dtype), alpha=-lr * scale_of(*piece.shape[1:]))

    def _orthogonal(self, views: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The orthogonal factors of blocks [N, height, columns] of one shape, in `dtype`."""
        flat = [v.to(self.dtype) for v in views]
        stacked = flat[0] if len(flat) == 1 else torch.cat(flat)
        pieces = stacked.split(max(1, self._limit // stacked[0].numel()))
        moved = torch.cat([orthogonalize(piece, steps=self.steps) for piece in pieces])
        return moved.split([len(v) for v in views])

    def state(self) -> dict[str, Tensor]:
        """Momentum by parameter name; the tensors themselves, not copies."""
        return dict(zip(self.names, self.buffers, strict=True))


def scale_of(height: int, width: int) -> float:
    """What makes the root-mean-square of an orthogonal block's update 0.2."""
    return 0.2 * math.sqrt(max(height, width))


def _plan(
    parameters: Sequence[MuonParameter], within: Sequence[slice], limit: int
) -> "Iterator[list[_Slot]]":
    by_shape: dict[tuple[int, int], list[_Slot]] = {}
    for index, (parameter, part) in enumerate(zip(parameters, within, strict=True)):
        start = 0
        for height in parameter.rows:
            slot = _Slot(index, part, start, height, sum(parameter.rows))
            if slot.view(parameter.weight).numel():
                by_shape.setdefault((height, parameter.weight.shape[-1]), []).append(slot)
            start += height
    for slots in by_shape.values():
        batch: list[_Slot] = []
        elements = 0
        for slot in slots:
            size = slot.view(parameters[slot.parameter].weight).numel()
            if batch and elements + size > limit:
                yield batch
                batch, elements = [], 0
            batch.append(slot)
            elements += size
        yield batch
