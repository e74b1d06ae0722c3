"""Routed experts that stay MXFP4 in memory; the experts a batch visits are dequantised in turn.

Legend: R rows (token, choice pairs sorted by expert), E experts, L latent width, F inner width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from openk3.config import ModelConfig
from openk3.model.ports import routed_by_sorting
from openk3.ops import moe, mx

Matrices = tuple[Tensor, Tensor, Tensor]
"""w1 [F, L], w3 [F, L], w2 [L, F] of one expert."""


class PackedExperts(nn.Module):
    """One layer's experts as buffers: w1/w3 packed [E, F, L/2] and scale [E, F, L/32], w2 alike."""

    def __init__(self, config: ModelConfig, stacks: dict[str, mx.Quantized]) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.betas = config.activation_situ_beta, config.activation_situ_linear_beta
        self.mxfp8_inputs = False
        for matrix, (data, scale) in stacks.items():
            self.register_buffer(f"{matrix}_packed", data)
            self.register_buffer(f"{matrix}_scale", scale)

    def packed(self, matrix: str, expert: int) -> mx.Quantized:
        """The stored bytes of w1, w3 or w2 of one expert."""
        return mx.Quantized(
            self.get_buffer(f"{matrix}_packed")[expert], self.get_buffer(f"{matrix}_scale")[expert]
        )

    def sorted_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """rows [R, L] grouped by expert, offsets [E] (end of each group) -> [R, L]."""

        def matrices(expert: int) -> Matrices:
            w1, w3, w2 = (
                mx.dequantize(*self.packed(matrix, expert), dtype=rows.dtype)
                for matrix in ("w1", "w3", "w2")
            )
            return w1, w3, w2

        return expert_by_expert(rows, offsets, matrices, self.betas, self.mxfp8_inputs)

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, L], ids and weights [T, k] -> the weighted sum of each token's experts [T, L]."""
        return routed_by_sorting(self, x, ids, weights)


def expert_by_expert(
    rows: Tensor,
    offsets: Tensor,
    matrices: Callable[[int], Matrices],
    betas: tuple[float, float | None],
    mxfp8_inputs: bool,
) -> Tensor:
    """The grouped MLP with one expert's matrices in memory at a time; experts without rows are
    never asked for. rows [R, L], offsets [E] -> [R, L]."""
    pieces, start = [], 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            group = torch.tensor([end - start], dtype=torch.int32, device=rows.device)
            w1, w3, w2 = (weight[None] for weight in matrices(expert))
            piece = grouped_mlp(rows[start:end], group, w1, w3, w2, betas, mxfp8_inputs)
            pieces.append(piece)
            start = end
    return torch.cat(pieces) if pieces else rows.new_zeros(rows.shape)


def grouped_mlp(
    rows: Tensor,
    offsets: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    betas: tuple[float, float | None],
    mxfp8_inputs: bool,
) -> Tensor:
    """`moe.grouped_mlp`, with the input of each product passed through MXFP8 if asked for."""
    if not mxfp8_inputs:
        return moe.grouped_mlp(rows, offsets, w1, w3, w2, *betas)
    rows = mx.fake_quantize(rows, "mxfp8")
    gate = moe.grouped_linear(rows, w1, offsets)
    up = moe.grouped_linear(rows, w3, offsets)
    inner = mx.fake_quantize(moe.situ_glu(gate, up, *betas), "mxfp8")
    return moe.grouped_linear(inner, w2, offsets)
