"""What the launches of the Triton KDA kernels share: the call by rows, its geometry, tuning."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from openk3.ops.kda.segments import Segments, num_slots, plan_segments
from openk3.ops.kda.triton_scan import scan_forward_kernel
from openk3.ops.triton_support import num_sms

TILE = 16
INTERPRETED = not isinstance(scan_forward_kernel, triton.JITFunction)


class Tuning(NamedTuple):
    """Launch parameters of each kernel, chosen by measurement on an H200."""

    prepare: dict[str, int]
    v_rows: int
    """Columns of the state that one scan program owns."""
    forward: dict[str, int]
    backward: dict[str, int]
    pairs: dict[str, int]
    grads: dict[str, int]
    column_width: int
    """Columns of a head that grads_kernel holds at a time."""


TUNING = Tuning(
    prepare={"num_warps": 1},
    v_rows=64,
    forward={"num_warps": 4, "STAGES": 4},
    backward={"num_warps": 4, "STAGES": 4},
    pairs={"num_warps": 4},
    grads={"num_warps": 4},
    column_width=32,
)


class Inputs(NamedTuple):
    """Arguments of a call, by rows: the tokens of the whole batch."""

    q: Tensor
    """[rows, H, D], as k, v, g; any strides but a dense last dimension."""
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    """[rows, H]"""
    A_log: Tensor
    """[H] float32"""
    dt_bias: Tensor | None
    """[H * D] float32"""
    cu: Tensor | None
    """[N + 1] offsets of packed sequences, on the device."""
    lower_bound: float
    scale: float

    def rows(self, *names: str) -> dict[str, Any]:
        """Tensors and their strides, named as the kernels name them."""
        tensors = {name: getattr(self, name) for name in names}
        return tensors | strides(**tensors)


@dataclass(frozen=True)
class Problem:
    """The geometry of one call."""

    rows: int
    tokens: int
    """Of the packed row, or of each sequence."""
    num_seqs: int
    heads: int
    dim: int
    packed: bool
    operand: torch.dtype
    """dtype of tensor-core operands, scratch and checkpoints."""
    segments: Segments

    def slots(self, unit: int) -> int:
        return num_slots(self.tokens, self.num_seqs, unit, self.packed)

    @property
    def v_rows(self) -> int:
        return min(TUNING.v_rows, self.dim)

    @property
    def precision(self) -> str:
        return "tf32x3" if self.operand == torch.float32 else "tf32"

    def common(self, x: Inputs) -> dict[str, Any]:
        """Arguments that every kernel but the fold takes."""
        return {
            "cu": x.cu,
            "tokens": self.tokens,
            "num_seqs": self.num_seqs,
            "H": self.heads,
            "D": self.dim,
            "PACKED": self.packed,
            "PRECISION": self.precision,
        }


def problem_of(q: Tensor, cu_seqlens: Tensor | None, segment: int = 0) -> Problem:
    """Geometry of a call on q [B, T, H, D]. segment: tokens a segment; 0 lets it plan."""
    batch, tokens, heads, dim = q.shape
    packed = cu_seqlens is not None
    num_seqs = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    if segment == 0:
        segments = plan_segments(tokens, num_seqs, heads, num_sms(q.device), packed)
    else:
        segments = Segments(segment, num_slots(tokens, num_seqs, segment, packed))
    wide = q.dtype == torch.float32 or INTERPRETED  # the interpreter has no bf16 products
    operand = torch.float32 if wide else torch.bfloat16
    return Problem(batch * tokens, tokens, num_seqs, heads, dim, packed, operand, segments)


def as_rows(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B * T, ...] with a dense last dimension; copies only if it must."""
    rows = x.flatten(0, 1)
    dense = rows.ndim < 3 or rows.stride(-1) == 1
    return rows if dense else rows.contiguous()


def strides(**tensors: Tensor) -> dict[str, int]:
    """Row and head strides of [rows, H, ...] tensors, named as the kernels name them."""
    out = {}
    for name, x in tensors.items():
        out[f"{name}_row"], out[f"{name}_head"] = x.stride(0), x.stride(1)
    return out
