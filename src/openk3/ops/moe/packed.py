"""Routed experts on MXFP4 weights on a GPU: which kernels serve how many tokens (K3 report §4).

Up to 512 tokens at top-16 the chosen experts' bytes are streamed through the token-centric kernel.
Above, where every weight is used many times, a layer's experts are dequantised (exactly) into
bfloat16 for the duration of the call and take the grouped products of training.

Legend: T tokens, k choices, E experts, L latent width, F inner width.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from openk3.ops.triton_support import triton_runs

if TYPE_CHECKING:
    from openk3.ops.moe.mxfp4_layout import PackedExperts

MAX_DENSE_BYTES = 16e9


def packed_kernels_run(
    *, device: torch.device, dtype: torch.dtype, widths: tuple[int, int]
) -> tuple[bool, str]:
    """(usable, reason) for x of `dtype` and (L, F) = `widths`."""
    if dtype not in (torch.bfloat16, torch.float32) or any(w % 128 for w in widths):
        return (
            False,
            f"the kernels take bfloat16 or float32 and widths 128 n, not {dtype}, {widths}",
        )
    return triton_runs(device)


def packed_expert_mlp(
    x: Tensor, ids: Tensor, weights: Tensor, experts: "PackedExperts", beta1: float,
    beta2: float | None, *, mxfp8_inputs: bool = False,
) -> Tensor:  # fmt: skip
    """`expert_mlp` on packed experts, any number of tokens, without gradient.

    x [T, L], ids and weights [T, k]; returns [T, L]. mxfp8_inputs rounds the inputs of both
    products to MXFP8, as quantisation-aware training did.
    """
    from openk3.ops.moe.mxfp4 import MAX_PAIRS, dequantised, mxfp4_expert_mlp

    num_experts, inner = experts.w1.scales.shape[:2]
    dense_bytes = 6 * num_experts * inner * experts.w2.scales.shape[1]
    if ids.numel() > MAX_PAIRS and not mxfp8_inputs and dense_bytes <= MAX_DENSE_BYTES:
        from openk3.ops.moe.experts import expert_mlp

        w1, w3, w2 = (dequantised(matrix, x.dtype) for matrix in experts)
        return expert_mlp(x, ids, weights, w1, w3, w2, beta1, beta2)
    step = max(1, MAX_PAIRS // ids.shape[1])
    pieces = [
        mxfp4_expert_mlp(
            x[i : i + step], ids[i : i + step], weights[i : i + step], experts, beta1, beta2,
            activations="mxfp8" if mxfp8_inputs else "bf16",
        )
        for i in range(0, max(1, ids.shape[0]), step)
    ]  # fmt: skip
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
