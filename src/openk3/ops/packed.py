"""Packed sequences: `cu_seqlens` checks, the lengths they describe, and moving their rows about."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from openk3.errors import InputError
from openk3.ops.checks import check_kind


def check_offsets(batch: int, tokens: int, cu_seqlens: Tensor | None) -> int:
    """The number of sequences. Checks cu_seqlens' form, and its values unless they are on a GPU."""
    if cu_seqlens is None:
        return batch
    _check_form(batch, cu_seqlens)
    if cu_seqlens.device.type == "cpu":
        return len(sequence_lengths(batch, tokens, cu_seqlens))
    return cu_seqlens.numel() - 1


def sequence_lengths(batch: int, tokens: int, cu_seqlens: Tensor | None) -> list[int]:
    """Lengths of the N sequences of x [B, T, ...]: B times T, or the pieces of a packed row.

    cu_seqlens [N + 1] integer, from 0 to T, never decreasing; then B must be 1. Raises InputError.
    """
    if cu_seqlens is None:
        return [tokens] * batch
    _check_form(batch, cu_seqlens)
    offsets = cu_seqlens.tolist()
    lengths = [b - a for a, b in pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] != tokens or min(lengths, default=0) < 0:
        raise InputError(
            f"cu_seqlens must rise from 0 to T = {tokens} without decreasing; it is "
            f"{offsets[:8]}{'...' if len(offsets) > 8 else ''}"
        )
    return lengths


def _check_form(batch: int, cu_seqlens: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1:
        raise InputError(f"cu_seqlens must be a 1-D tensor of N + 1 offsets, not {cu_seqlens}")
    check_kind("cu_seqlens", cu_seqlens, "integer")
    if batch != 1:
        raise InputError(f"with cu_seqlens the batch must be 1 packed row, not {batch}")


class Scatter(torch.autograd.Function):
    """rows[slots] = x into zeros; slots are distinct, so the gradient is a plain gather."""

    @staticmethod
    def forward(ctx, x: Tensor, slots: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(slots)
        return x.new_zeros(num_slots, *x.shape[1:]).index_copy_(0, slots, x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class Gather(torch.autograd.Function):
    """x[slots]; slots are distinct, so the gradient is a plain copy into zeros."""

    @staticmethod
    def forward(ctx, x: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.num_slots = x.shape[0]
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (slots,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_slots, *grad.shape[1:]).index_copy_(0, slots, grad), None


@dataclass(frozen=True)
class SpacedLayout:
    """Sequences in one row, each behind a gap of `width` rows for what came before it."""

    slots: Tensor
    """[T] int64: row of each token."""
    gaps: Tensor
    """[N * width] int64: rows of the gaps."""
    ends: Tensor
    """[N * width] int64: the last `width` rows of each sequence (its gap's where it is short)."""


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # what generating caches, training saves for backward
def spaced_layout(lengths: tuple[int, ...], width: int, device: torch.device) -> SpacedLayout:
    """The layout of N sequences of these lengths (empty ones allowed)."""
    length = torch.tensor(lengths, dtype=torch.int64)
    stops = (length + width).cumsum(0)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), length)
    slots = torch.arange(int(length.sum())) + (owner + 1) * width
    back = torch.arange(-width, 0)
    gaps = (stops - length)[:, None] + back
    ends = stops[:, None] + back
    return SpacedLayout(*(x.reshape(-1).to(device) for x in (slots, gaps, ends)))


def length_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the non-empty sequences; lengths in a group differ by less than 2x."""
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        if length:
            groups.setdefault((length - 1).bit_length(), []).append(index)
    return list(groups.values())
