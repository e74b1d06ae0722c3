"""Launches of `ring_kernels`: which rows they take, and their tuned numbers.

Measured on an H200 at 7168 channels (benchmarks/results/attn_res.md).
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from openk3.ops.triton_support import capability, has_gluon, launch, num_sms

PIECE = 512
"""Words of two channels in a piece of a row."""
SHARED = 227 * 1024
"""Bytes of shared memory a program may have."""


class Ring(NamedTuple):
    """Numbers of one launch."""

    num_warps: int
    slots: int
    """Rows in shared memory."""
    group: int
    """Rows that share a barrier."""
    per_sm: int
    """Programs a multiprocessor."""


@cache
def _fits(device: torch.device) -> bool:
    if capability(device) < (9, 0) or not has_gluon():
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= SHARED


def takes(x: Tensor) -> bool:
    """Whether rows of x [T, D] pass through the ring; narrower ones fit into registers."""
    wide = 4096 < x.shape[1] <= 8192 and x.shape[1] % 64 == 0
    return wide and x.dtype == torch.bfloat16 and _fits(x.device)


def _row_bytes(dim: int) -> int:
    return -(-dim // (2 * PIECE)) * 4 * PIECE


def forward_ring(num_sources: int, dim: int) -> Ring:
    """Two programs a multiprocessor, each with half of its shared memory."""
    return Ring(4, min(7, SHARED // 2 // _row_bytes(dim)), min(3, num_sources), 2)


def backward_ring(num_sources: int, dim: int) -> Ring | None:
    """None if a token's rows and some of the next token's do not fit together."""
    if num_sources <= 3:
        return forward_ring(min(2, num_sources), dim)
    slots = min(15, SHARED // _row_bytes(dim))
    return Ring(8, slots, 3, 1) if num_sources + 3 <= slots else None


def _meta(x: Tensor, ring: Ring) -> dict[str, int]:
    return {
        "D": x.shape[1], "N": x.shape[1] // 2, "C": PIECE, "SLOTS": ring.slots,
        "GROUP": ring.group, "W": ring.num_warps, "num_warps": ring.num_warps,
    }  # fmt: skip


def _programs(x: Tensor, ring: Ring) -> int:
    return min(x.shape[0], ring.per_sm * num_sms(x.device))


def forward(
    sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float,
    out: Tensor | None, normed: Tensor | None, out_weight: Tensor | None, out_eps: float,
    stats: Tensor | None,
) -> None:  # fmt: skip
    """`kernels.mix_forward` of one row of tokens or more; what is None is not written."""
    from openk3.ops.attn_res import ring_kernels

    first = sources[0]
    ring = forward_ring(len(sources), first.shape[1])
    launch(
        ring_kernels.mix_forward, (_programs(first, ring),),
        tuple(sources), query, norm_weight, out, normed, out_weight, stats, first.shape[0], eps,
        out_eps, **_meta(first, ring), STORE_OUT=out is not None, STORE_STATS=stats is not None,
        NORM=normed is not None,
    )  # fmt: skip


def backward(
    sources: Sequence[Tensor], grads: Sequence[Tensor], query: Tensor, norm_weight: Tensor,
    d_out: Tensor, stats: Tensor, ring: Ring,
) -> Tensor:  # fmt: skip
    """`kernels.mix_backward`: fills grads; returns the partial sums d_key [programs, D] float32."""
    from openk3.ops.attn_res import ring_kernels

    first = sources[0]
    programs = _programs(first, ring)
    d_key = first.new_empty(programs, first.shape[1], dtype=torch.float32)
    launch(
        ring_kernels.mix_backward, (programs,),
        tuple(sources), tuple(grads), query, norm_weight, d_out, stats, d_key, first.shape[0],
        **_meta(first, ring),
    )  # fmt: skip
    return d_key
