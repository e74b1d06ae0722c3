"""Packed sequences: `cu_seqlens` checks and the lengths they describe."""

from itertools import pairwise

from torch import Tensor

from openk3.errors import InputError


def sequence_lengths(batch: int, tokens: int, cu_seqlens: Tensor | None) -> list[int]:
    """Lengths of the N sequences of x [B, T, ...]: B times T, or the pieces of a packed row.

    cu_seqlens [N + 1] integer, from 0 to T, never decreasing; then B must be 1. Raises InputError.
    """
    if cu_seqlens is None:
        return [tokens] * batch
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise InputError(
            f"cu_seqlens must be a 1-D integer tensor of N + 1 offsets, not shape "
            f"{list(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        )
    if batch != 1:
        raise InputError(f"with cu_seqlens the batch must be 1 packed row, not {batch}")
    offsets = cu_seqlens.tolist()
    lengths = [b - a for a, b in pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] != tokens or min(lengths, default=0) < 0:
        raise InputError(
            f"cu_seqlens must rise from 0 to T = {tokens} without decreasing; it is "
            f"{offsets[:8]}{'...' if len(offsets) > 8 else ''}"
        )
    return lengths
