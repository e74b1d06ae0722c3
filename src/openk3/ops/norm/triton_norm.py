"""RMSNorm through the Triton kernels, with autograd."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.norm import kernels
from openk3.ops.rows import dense, dense_vector, few_warps, row_meta
from openk3.ops.triton_support import launch, num_sms


def _launch(x: Tensor, per_sm: int) -> tuple[tuple[int], dict[str, object]]:
    tokens, dim = x.shape
    grid = (max(1, min(tokens, per_sm * num_sms(x.device))),)
    return grid, row_meta(x, few_warps(dim, x.dtype))


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, D] contiguous -> [T, D]."""
    out = torch.empty_like(x)
    if x.shape[0]:
        grid, meta = _launch(x, 4)
        launch(kernels.norm_forward, grid, x, weight, out, x.shape[0], eps, **meta)
    return out


def rms_norm_backward(
    d_out: Tensor, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(d_x [T, D], d_weight [D], the latter summed in float32 in a fixed order)."""
    d_x, d_weight = torch.empty_like(x), torch.empty_like(weight)
    if not x.shape[0]:
        return d_x, d_weight.zero_()
    grid, meta = _launch(x, 2)
    parts = x.new_empty(grid[0], x.shape[1], dtype=torch.float32)
    launch(kernels.norm_backward, grid, d_out, x, weight, d_x, parts, x.shape[0], eps, **meta)
    launch(
        kernels.sum_parts,
        (-(-x.shape[1] // 64),),
        parts,
        d_weight,
        grid[0],
        D=x.shape[1],
        BLOCK=64,
        PARTS=32,
        num_warps=4,
    )
    return d_x, d_weight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm_forward(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        x, weight = ctx.saved_tensors
        return *rms_norm_backward(dense(grads[0]), x, weight, ctx.eps), None


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] -> the same shape and dtype."""
    rows = dense(x.reshape(-1, x.shape[-1]))
    return _RMSNorm.apply(rows, dense_vector(weight), eps).view(x.shape)
