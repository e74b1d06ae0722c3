"""Two-phase Block AttnRes for inference (K3 report §5.2): read the finished blocks once a block.

Layer by layer, each of a block's Q = 24 queries reads all N finished blocks. In two phases one
pass makes every query's mix of the finished blocks with the log-sum-exp of its scores; then each
sublayer only joins its mix with the running sum. The two ways are equal up to rounding. How many
bytes each moves is arithmetic: `plan_bytes`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openk3.errors import InputError
from openk3.ops.attn_res.reference import check_sources, depth_score
from openk3.ops.backends import triton_or_reference
from openk3.ops.checks import check_kind, check_tensor
from openk3.ops.norm import rms_norm
from openk3.ops.precision import outside_autocast, wide_dtype
from openk3.ops.triton_support import triton_runs

RATE = 0.6
"""Bytes a second of two phases over those of one, measured on an H200 at 8192 tokens."""


class Bytes(NamedTuple):
    """What mixing moves through memory for one block of layers."""

    one_phase: int
    two_phase: int

    @property
    def two_phase_wins(self) -> bool:
        """Whether it moves so many fewer bytes that it takes less time."""
        return self.two_phase < RATE * self.one_phase


def plan_bytes(
    num_finished: int, num_queries: int, tokens: int, dim: int, itemsize: int = 2
) -> Bytes:
    """Bytes of a block whose first query meets no running sum yet and whose others do.

    One phase: the first query reads N rows a token and writes one, every other reads N + 1. Two
    phases: N rows read and Q written once, then Q - 1 merges of two rows read and one written.
    """
    if num_finished < 1 or num_queries < 1:
        raise InputError(f"{num_finished} finished blocks, {num_queries} queries: both at least 1")
    row = tokens * dim * itemsize
    one = num_finished + 1 + (num_queries - 1) * (num_finished + 2)
    two = num_finished + num_queries + 3 * (num_queries - 1)
    return Bytes(one * row, two * row)


class _Reference:
    @staticmethod
    def block_partials(sources, queries, norm_weights, eps):
        wide = wide_dtype(sources[0])
        stacked = torch.stack([v.to(wide) for v in sources])
        rstd = torch.rsqrt(stacked.pow(2).mean(-1) + eps)
        keys = queries.to(wide) * norm_weights.to(wide)
        with outside_autocast(keys.device):
            scores = torch.einsum("ntd,qd->qtn", stacked, keys) * rstd.T
            mixed = torch.einsum("qtn,ntd->qtd", scores.softmax(-1), stacked)
        return mixed.to(sources[0].dtype), scores.logsumexp(-1)

    @staticmethod
    def merge_running(partial, lse, running, query, norm_weight, eps, out_norm):
        p = running.to(wide_dtype(running))
        with outside_autocast(p.device):
            score = depth_score(p, query.to(p.dtype) * norm_weight.to(p.dtype), eps)
        share = torch.sigmoid(score - lse)[:, None]
        mixed = ((1 - share) * partial.to(p.dtype) + share * p).to(running.dtype)
        return mixed if out_norm is None else rms_norm(mixed, *out_norm, backend="reference")


def _triton() -> Any:
    from openk3.ops.attn_res import triton_two_phase

    return triton_two_phase


def _triton_usable(
    *, device: torch.device, dtype: torch.dtype, dim: int, **_: Any
) -> tuple[bool, str]:
    if dtype not in (torch.bfloat16, torch.float32) or dim % 64:
        return False, f"the kernel takes bfloat16 or float32 of width 64 n, not {dtype} of {dim}"
    return triton_runs(device)


BACKENDS = triton_or_reference("attn_res_two_phase", _triton_usable, _triton, lambda: _Reference)


def block_partials(
    sources: Sequence[Tensor],
    queries: Tensor,
    norm_weights: Tensor,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Phase one: (mixes [Q, T, D] in the sources' dtype, log-sum-exp of the scores [Q, T] float32).

    sources: 1 to 16 finished blocks [T, D]; queries, norm_weights [Q, D], Q at most 32. No grad.
    Raises InputError, BackendError.
    """
    first = check_sources(sources)
    if first.ndim != 2 or queries.ndim != 2 or not 1 <= queries.shape[0] <= 32:
        raise InputError(
            f"sources {list(first.shape)}, queries {list(queries.shape)} must be [T, D] and [Q, D] "
            "with Q at most 32"
        )
    dim = first.shape[1]
    check_tensor("queries", queries, (queries.shape[0], dim), first.device)
    check_tensor("norm_weights", norm_weights, queries.shape, first.device)
    chosen = BACKENDS.resolve(backend, device=first.device, dtype=first.dtype, dim=dim)
    with torch.no_grad():
        return chosen.load().block_partials(sources, queries, norm_weights, eps)


def merge_running(
    partial: Tensor,
    lse: Tensor,
    running: Tensor,
    query: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-5,
    *,
    out_norm: tuple[Tensor, float] | None = None,
    backend: str | None = None,
) -> Tensor:
    """Phase two: mix([finished blocks..., running]) [T, D] from one query's phase-one result.

    partial [T, D], lse [T], running [T, D], query and norm_weight [D]. With out_norm (weight [D],
    eps) returns the RMSNorm of the mix, in the same pass. No gradient. Raises InputError,
    BackendError.
    """
    if running.ndim != 2 or partial.dtype != running.dtype:
        raise InputError(
            f"running {list(running.shape)} of {running.dtype} must be [T, D] and of partial's "
            f"dtype {partial.dtype}"
        )
    device, dim = running.device, running.shape[1]
    check_kind("running", running)
    check_tensor("partial", partial, running.shape, device)
    check_tensor("lse", lse, running.shape[:1], device)
    check_tensor("query", query.reshape(-1), (dim,), device)
    check_tensor("norm_weight", norm_weight, (dim,), device)
    if out_norm is not None:
        check_tensor("out_norm's weight", out_norm[0], (dim,), device)
    chosen = BACKENDS.resolve(backend, device=running.device, dtype=running.dtype, dim=dim)
    with torch.no_grad():
        return chosen.load().merge_running(
            partial, lse, running, query.reshape(-1), norm_weight, eps, out_norm
        )
