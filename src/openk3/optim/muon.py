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
    start: int
    height: int
    period: int

    def view(self, matrix: Tensor) -> Tensor:
        """The blocks as a view [..., height, columns] of `matrix`."""
        blocks = matrix.unflatten(-2, (-1, self.period))
        return blocks[..., self.start : self.start + self.height, :]


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
    ) -> None:
        """dtype: of the Newton-Schulz products; float32 on CPUs, bfloat16 is enough on GPUs."""
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
        self._batches = list(_plan(parameters, self._limit))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from `.grad` of every weight (None counts as zero), at learning rate `lr`."""
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights]
        torch._foreach_mul_(self.buffers, self.momentum)
        torch._foreach_add_(self.buffers, grads)
        updates = torch._foreach_add(grads, self.buffers, alpha=self.momentum)
        torch._foreach_mul_(self.weights, 1.0 - lr * self.weight_decay)
        for batch in self._batches:
            self._apply(batch, updates, lr)

    def _apply(self, batch: "list[_Slot]", updates: Sequence[Tensor], lr: float) -> None:
        views = [slot.view(updates[slot.parameter]) for slot in batch]
        height, width = views[0].shape[-2:]
        flat = [v.reshape(-1, height, width).to(self.dtype) for v in views]
        stacked = flat[0] if len(flat) == 1 else torch.cat(flat)
        pieces = stacked.split(max(1, self._limit // (height * width)))
        moved = torch.cat([orthogonalize(piece, steps=self.steps) for piece in pieces])
        pieces = moved.split([v.numel() // (height * width) for v in views])
        scale = -lr * 0.2 * math.sqrt(max(height, width))
        for slot, piece, view in zip(batch, pieces, views, strict=True):
            target = slot.view(self.weights[slot.parameter])
            target.add_(piece.view(view.shape).to(target.dtype), alpha=scale)

    def state(self) -> dict[str, Tensor]:
        """Momentum by parameter name; the tensors themselves, not copies."""
        return dict(zip(self.names, self.buffers, strict=True))


def _plan(parameters: Sequence[MuonParameter], limit: int) -> "Iterator[list[_Slot]]":
    by_shape: dict[tuple[int, int], list[_Slot]] = {}
    for index, parameter in enumerate(parameters):
        start = 0
        for height in parameter.rows:
            slot = _Slot(index, start, height, sum(parameter.rows))
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
