"""Launches of the two-phase kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from openk3.ops.attn_res import two_phase_kernels as kernels
from openk3.ops.row_kernels import row_layout
from openk3.ops.triton_support import launch, num_sms


def block_partials(
    sources: Sequence[Tensor], queries: Tensor, norm_weights: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    flat = [v.contiguous() for v in sources]
    tokens, dim = flat[0].shape
    num_queries = queries.shape[0]
    out = flat[0].new_empty(num_queries, tokens, dim)
    lse = flat[0].new_empty(num_queries, tokens, dtype=torch.float32)
    per_program = 16 // max(1, 1 << (len(flat) - 1).bit_length())
    if tokens:
        launch(
            kernels.block_partials, (-(-tokens // per_program),),
            tuple(flat), queries.contiguous(), norm_weights.contiguous(), out, lse, tokens, eps,
            D=dim, Q=num_queries, Q_PAD=max(16, 1 << (num_queries - 1).bit_length()),
            P=per_program, BC=min(128, dim & -dim),
            SPLIT=flat[0].is_cuda and flat[0].dtype == torch.bfloat16,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return out, lse


def merge_running(
    partial: Tensor, lse: Tensor, running: Tensor, query: Tensor, norm_weight: Tensor, eps: float,
    out_norm: tuple[Tensor, float] | None,
) -> Tensor:  # fmt: skip
    tokens, dim = running.shape
    packed, n, c = row_layout(dim, running.dtype)
    warps = max(1, min(8, c // 64))
    weight, out_eps = out_norm or (None, 0.0)
    out = torch.empty_like(running)
    if tokens:
        launch(
            kernels.merge_running, (max(1, min(tokens, 3 * num_sms(running.device))),),
            partial.contiguous(), lse.contiguous(), running.contiguous(), query, norm_weight,
            weight, out, tokens, eps, out_eps,
            D=dim, PACKED=packed, N=n, C=c, VEC=max(1, c // (32 * warps)),
            NORM=out_norm is not None, ASM=running.is_cuda, num_warps=warps,
        )  # fmt: skip
    return out
