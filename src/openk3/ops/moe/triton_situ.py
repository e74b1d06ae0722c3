"""SiTU-GLU through the elementwise Triton kernels; gate and up are all that is kept.

Legend: R rows, F columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.moe import situ_kernels as kernels
from openk3.ops.triton_support import launch, num_sms, power_of_two


class Betas(NamedTuple):
    beta1: float
    beta2: float | None


def situ_forward(gate: Tensor, up: Tensor, betas: Betas, last_row: Tensor | None = None) -> Tensor:
    """gate, up [R, F] (rows contiguous, perhaps halves of [R, 2 F]) -> [R, F]."""
    act = gate.new_empty(gate.shape)
    if gate.numel():
        grid, meta = _situ_launch(gate, betas)
        launch(
            kernels.situ_rows, grid, gate, up, act, last_row, gate.shape[0], betas.beta1,
            betas.beta2 or 0.0, LIMIT=last_row is not None, **meta,
        )  # fmt: skip
    return act


def situ_backward(
    gate: Tensor, up: Tensor, d_act: Tensor, d_gate: Tensor, d_up: Tensor, betas: Betas,
    row_weight: Tensor | None = None, last_row: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Fill d_gate, d_up; with `row_weight` [R] scale all by it, overwrite d_act with the scaled
    activation and return the rows' own gradient [R] float32."""
    d_weight = None if row_weight is None else torch.empty_like(row_weight)
    if gate.numel():
        grid, meta = _situ_launch(gate, betas)
        launch(
            kernels.situ_rows_backward, grid, gate, up, d_act, row_weight, d_gate, d_up, d_act,
            d_weight, last_row, gate.shape[0], betas.beta1, betas.beta2 or 0.0,
            WEIGHTED=row_weight is not None, LIMIT=last_row is not None, **meta,
        )  # fmt: skip
    return d_weight


def _situ_launch(gate: Tensor, betas: Betas) -> tuple[tuple[int], dict[str, object]]:
    rows, width = gate.shape
    block_rows = 1 if gate.is_cuda else 64
    meta = {
        "PITCH": gate.stride(0), "F": width,
        "BR": block_rows, "BC": min(1024, power_of_two(width)),
        "CAP": betas.beta2 is not None, "ASM": gate.is_cuda, "num_warps": 4,
    }  # fmt: skip
    return (max(1, min(-(-rows // block_rows), 12 * num_sms(gate.device))),), meta


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, beta1: float, beta2: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = Betas(beta1, beta2)
        return situ_forward(gate, up, ctx.betas)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        situ_backward(gate, up, grads[0].contiguous(), d_gate, d_up, ctx.betas)
        return d_gate, d_up, None, None


def situ_triton(gate: Tensor, up: Tensor, beta1: float, beta2: float | None) -> Tensor:
    """gate, up [..., F] -> [..., F]."""
    width = gate.shape[-1]
    rows = [x.reshape(-1, width).contiguous() for x in (gate, up)]
    return _Situ.apply(*rows, beta1, beta2).view(gate.shape)
