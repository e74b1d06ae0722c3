"""Routed experts that stay MXFP4 in memory.

On a GPU the kernels of `openk3.ops.moe.packed` read the 4-bit weights themselves, in an order of
their own into which the buffers are permuted, in place, at first use. Elsewhere the experts that a
batch visits are dequantised in turn.

Legend: R rows (token, choice pairs sorted by expert), E experts, L latent width, F inner width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from openk3.config import ModelConfig
from openk3.model.ports import routed_by_sorting
from openk3.ops import moe, mx
from openk3.ops.moe.packed import packed_expert_mlp, packed_kernels_run

Matrices = tuple[Tensor, Tensor, Tensor]
"""w1 [F, L], w3 [F, L], w2 [L, F] of one expert."""


class PackedExperts(nn.Module):
    """One layer's experts as buffers: w1/w3 packed [E, F, L/2] and scale [E, F, L/32], w2 alike."""

    def __init__(self, config: ModelConfig, stacks: dict[str, mx.Quantized]) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.betas = config.activation_situ_beta, config.activation_situ_linear_beta
        self.mxfp8_inputs = False
        self.arranged = False
        """The buffers hold the kernels' order of bytes instead of the published one."""
        self.register_state_dict_pre_hook(lambda module, *_: module.publish())
        self.register_load_state_dict_pre_hook(lambda module, *_: module.publish())
        for matrix, (data, scale) in stacks.items():
            self.register_buffer(f"{matrix}_packed", data)
            self.register_buffer(f"{matrix}_scale", scale)

    def packed(self, matrix: str, expert: int) -> mx.Quantized:
        """The stored bytes of w1, w3 or w2 of one expert."""
        data = self.get_buffer(f"{matrix}_packed")[expert]
        if self.arranged:
            from openk3.ops.moe.mxfp4_layout import published_bytes

            data = published_bytes(data.view(torch.int16).view(-1, data.shape[1] // 64, 512))
        return mx.Quantized(data, self.get_buffer(f"{matrix}_scale")[expert])

    def arrange(self) -> None:
        """Permute the buffers into the kernels' order, within their own memory."""
        self._permute(to_kernels=True)

    def publish(self) -> None:
        """Permute the buffers back into the published order."""
        self._permute(to_kernels=False)

    def _permute(self, *, to_kernels: bool) -> None:
        if self.arranged == to_kernels:
            return
        from openk3.ops.moe.mxfp4_layout import arrange_in_place

        for matrix in ("w1", "w3", "w2"):
            arrange_in_place(self.get_buffer(f"{matrix}_packed"), back=not to_kernels)
        self.arranged = to_kernels

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
        inner, half = self.get_buffer("w1_packed").shape[1:]
        facts = {"device": x.device, "dtype": x.dtype, "widths": (2 * half, inner)}
        trained = torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
        if trained or not packed_kernels_run(**facts)[0]:
            return routed_by_sorting(self, x, ids, weights)
        return self._kernels(x, ids, weights)

    def _kernels(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        from openk3.ops.moe import mxfp4_layout

        self.arrange()
        w1, w3, w2 = (
            mxfp4_layout.as_matrix(
                self.get_buffer(f"{matrix}_packed"), self.get_buffer(f"{matrix}_scale")
            )
            for matrix in ("w1", "w3", "w2")
        )
        experts = mxfp4_layout.PackedExperts(w1, w3, w2)
        return packed_expert_mlp(
            x, ids, weights, experts, *self.betas, mxfp8_inputs=self.mxfp8_inputs
        )


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
            piece = moe.grouped_mlp(
                rows[start:end], group, w1, w3, w2, *betas, mxfp8_inputs=mxfp8_inputs
            )
            pieces.append(piece)
            start = end
    return torch.cat(pieces) if pieces else rows.new_zeros(rows.shape)
