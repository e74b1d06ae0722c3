"""Block AttnRes through the Triton kernels: launches, and the two autograd functions.

Wide rows pass through shared memory on the GPUs that have enough of it (`ring.py`); all others are
held in registers (`kernels.py`).

Kept for the backward pass are the sources themselves (which exist anyway) and 2 S + 1 float32
statistics a token; with the fused norm also the mixed row, which a plain residual would keep too.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.attn_res import kernels, ring
from openk3.ops.norm.triton_norm import rms_norm_backward
from openk3.ops.rows import dense, dense_vector, few_warps, row_layout, row_meta
from openk3.ops.triton_support import launch, num_sms


class Launch(NamedTuple):
    """Tuned numbers of one kernel for one (sources, width)."""

    num_warps: int
    per_sm: int
    """Programs a multiprocessor."""
    group: int
    """Rows that share a barrier, at most 3."""
    ahead: int
    """Rows requested before they are worked on."""
    resident: int = 0
    """Backward: rows that stay in registers between the two phases."""


@cache
def forward_launch(num_sources: int, dim: int, dtype: torch.dtype) -> Launch:
    """Tuned numbers of the forward kernel for S sources [T, dim]."""
    if dtype == torch.bfloat16 and row_layout(dim, dtype)[2] == 1024:
        per_sm = 2 if num_sources <= 3 else 1
        return Launch(8, per_sm, min(3, num_sources), min(3, num_sources))
    return Launch(few_warps(dim, dtype), 4, min(2, num_sources), 0)


@cache
def backward_launch(num_sources: int, dim: int, dtype: torch.dtype) -> Launch:
    """Tuned numbers of the backward kernel for S sources [T, dim]."""
    if dtype == torch.bfloat16 and row_layout(dim, dtype)[2] == 1024:
        if num_sources <= 3:
            return Launch(8, 1, num_sources, num_sources, num_sources)
        return Launch(8, 1, 3, 2)
    return Launch(few_warps(dim, dtype), 4, min(2, num_sources), 0)


def _meta(x: Tensor, config: Launch) -> dict[str, object]:
    return {**row_meta(x, config.num_warps), "GROUP": config.group, "AHEAD": config.ahead}


def _grid(tokens: int, config: Launch, device: torch.device) -> tuple[int]:
    return (max(1, min(tokens, config.per_sm * num_sms(device))),)


def launch_forward(
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    keep: bool,
    out_norm: tuple[Tensor, float] | None = None,
    keep_out: bool = True,
    config: Launch | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Flat sources [T, D] -> (mixed, normed, stats [T, 2 S + 1] float32); None if unwanted.

    `config`: the kernel that holds rows in registers, launched so, whatever the rows.
    """
    first = sources[0]
    tokens, dim = first.shape
    out = torch.empty_like(first) if keep_out else None
    normed = torch.empty_like(first) if out_norm else None
    stats = first.new_empty(tokens, 2 * len(sources) + 1, dtype=torch.float32) if keep else None
    out_weight, out_eps = out_norm or (None, 0.0)
    if tokens and config is None and ring.takes(first):
        ring.forward(
            sources, query, norm_weight, eps, out, normed, out_weight, out_eps, stats
        )  # fmt: skip
    elif tokens:
        config = config or forward_launch(len(sources), dim, first.dtype)
        launch(
            kernels.mix_forward, _grid(tokens, config, first.device),
            tuple(sources), query, norm_weight, out, normed, out_weight, stats,
            tokens, eps, out_eps,
            STORE_OUT=keep_out, STORE_STATS=keep, NORM=out_norm is not None, **_meta(first, config),
        )  # fmt: skip
    return out, normed, stats


def launch_backward(
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    d_out: Tensor,
    stats: Tensor,
    config: Launch | None = None,
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """(gradients of the sources, of query, of norm_weight); the last two are summed in float32."""
    first = sources[0]
    tokens, dim = first.shape
    grads = tuple(torch.empty_like(v) for v in sources)
    d_query, d_norm = torch.empty_like(query), torch.empty_like(norm_weight)
    if not tokens:
        return grads, d_query.zero_(), d_norm.zero_()
    in_ring = config is None and ring.takes(first)
    rows = ring.backward_ring(len(sources), dim) if in_ring else None
    if rows is not None:
        d_key = ring.backward(sources, grads, query, norm_weight, d_out, stats, rows)
    else:
        config = config or backward_launch(len(sources), dim, first.dtype)
        grid = _grid(tokens, config, first.device)
        d_key = first.new_empty(grid[0], dim, dtype=torch.float32)
        launch(
            kernels.mix_backward, grid,
            tuple(sources), grads, query, norm_weight, d_out, stats, d_key, tokens,
            RESIDENT=config.resident, EVICT="evict_last", **_meta(first, config),
        )  # fmt: skip
    launch(
        kernels.reduce_key, (-(-dim // 64),),
        d_key, query, norm_weight, d_query, d_norm, d_key.shape[0],
        D=dim, BLOCK=64, PARTS=32, num_warps=4,
    )  # fmt: skip
    return grads, d_query, d_norm


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, norm_weight: Tensor, eps: float, *sources: Tensor):
        keep = any(ctx.needs_input_grad)
        out, _, stats = launch_forward(sources, query, norm_weight, eps, keep=keep)
        ctx.save_for_backward(query, norm_weight, stats, *sources)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        query, norm_weight, stats, *sources = ctx.saved_tensors
        d_sources, d_query, d_norm = launch_backward(
            sources, query, norm_weight, dense(grads[0]), stats
        )
        return d_query, d_norm, None, *d_sources


class _MixNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, query: Tensor, norm_weight: Tensor, eps: float, out_weight: Tensor, out_eps: float,
        *sources: Tensor,
    ):  # fmt: skip
        keep = any(ctx.needs_input_grad)
        out, normed, stats = launch_forward(
            sources, query, norm_weight, eps, keep=keep, out_norm=(out_weight, out_eps),
            keep_out=keep,
        )  # fmt: skip
        ctx.save_for_backward(query, norm_weight, out_weight, out, stats, *sources)
        ctx.out_eps = out_eps
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        query, norm_weight, out_weight, out, stats, *sources = ctx.saved_tensors
        d_out, d_out_weight = rms_norm_backward(dense(grads[0]), out, out_weight, ctx.out_eps)
        d_sources, d_query, d_norm = launch_backward(sources, query, norm_weight, d_out, stats)
        return d_query, d_norm, None, d_out_weight, None, *d_sources


def _flat(sources: Sequence[Tensor]) -> list[Tensor]:
    return [dense(v.reshape(-1, v.shape[-1])) for v in sources]


def mix(
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    eps: float,
    return_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(mixed, weights [..., S] float32 without gradient, or None)."""
    flat = _flat(sources)
    lead = sources[0].shape
    query, norm_weight = dense_vector(query), dense_vector(norm_weight)
    mixed = _Mix.apply(query, norm_weight, eps, *flat).view(lead)
    if not return_weights:
        return mixed, None
    with torch.no_grad():
        _, _, stats = launch_forward(flat, query, norm_weight, eps, keep=True, keep_out=False)
    assert stats is not None, "statistics were asked for"
    weights = (stats[:, : len(flat)] - stats[:, -1:]).exp()
    return mixed, weights.view(*lead[:-1], len(flat))


def mix_norm(
    sources: Sequence[Tensor],
    query: Tensor,
    norm_weight: Tensor,
    eps: float,
    out_weight: Tensor,
    out_eps: float,
) -> Tensor:
    """RMSNorm(mix(sources)) in one pass over memory; the mixed row is written only for autograd."""
    query, norm_weight, out_weight = map(dense_vector, (query, norm_weight, out_weight))
    normed = _MixNorm.apply(query, norm_weight, eps, out_weight, out_eps, *_flat(sources))
    return normed.view(sources[0].shape)
