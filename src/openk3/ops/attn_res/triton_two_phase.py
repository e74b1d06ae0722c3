"""Launches of the two-phase kernels; arguments and results as of `two_phase`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from openk3.ops.attn_res import two_phase_kernels as kernels
from openk3.ops.rows import dense, dense_vector, few_warps, row_meta
from openk3.ops.triton_support import launch, num_sms, power_of_two


def block_partials(
    sources: Sequence[Tensor], queries: Tensor, norm_weights: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As `two_phase.block_partials`: S sources [T, D] -> partials [Q, T, D], log-sum-exp [Q, T]."""
    flat = [dense(v) for v in sources]
    tokens, dim = flat[0].shape
    num_queries = queries.shape[0]
    out = flat[0].new_empty(num_queries, tokens, dim)
    lse = flat[0].new_empty(num_queries, tokens, dtype=torch.float32)
    per_program = 16 // power_of_two(len(flat))
    if tokens:
        launch(
            kernels.block_partials, (-(-tokens // per_program),),
            tuple(flat), queries.contiguous(), norm_weights.contiguous(), out, lse, tokens, eps,
            D=dim, Q=num_queries, Q_PAD=power_of_two(num_queries, 16),
            P=per_program, BC=min(128, dim & -dim),
            SPLIT=flat[0].is_cuda and flat[0].dtype == torch.bfloat16,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return out, lse


def merge_running(
    partial: Tensor, lse: Tensor, running: Tensor, query: Tensor, norm_weight: Tensor, eps: float,
    out_norm: tuple[Tensor, float] | None,
) -> Tensor:  # fmt: skip
    """As `two_phase.merge_running` of one query: partial, running [T, D], lse [T] -> [T, D]."""
    tokens, dim = running.shape
    weight, out_eps = (dense_vector(out_norm[0]), out_norm[1]) if out_norm else (None, 0.0)
    out = torch.empty_like(running)
    if tokens:
        launch(
            kernels.merge_running, (max(1, min(tokens, 3 * num_sms(running.device))),),
            dense(partial), lse.contiguous(), dense(running), dense_vector(query),
            dense_vector(norm_weight), weight, out, tokens, eps, out_eps,
            NORM=out_norm is not None, **row_meta(running, few_warps(dim, running.dtype)),
        )  # fmt: skip
    return out
