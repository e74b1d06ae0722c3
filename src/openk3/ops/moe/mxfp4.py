"""Routed experts on 4-bit weights for decoding: 1 to a few hundred tokens (K3 report §4)."""

from typing import Literal

import torch
from torch import Tensor

from openk3.errors import InputError
from openk3.ops.checks import check_range, check_tensor
from openk3.ops.moe import mxfp4_kernels as kernels
from openk3.ops.moe.mxfp4_layout import PackedExperts, PackedMatrix
from openk3.ops.triton_support import launch, power_of_two

MAX_PAIRS = 8192  # the planning kernel sorts all of them in one program


def mxfp4_expert_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: PackedExperts,
    beta1: float = 4.0,
    beta2: float | None = 25.0,
    *,
    activations: Literal["bf16", "mxfp8"] = "bf16",
) -> Tensor:
    """`expert_mlp` on packed experts, without gradient.

    x [T, L] bfloat16 or float32, ids [T, k] distinct experts, weights [T, k] float32; returns
    [T, L] in x's dtype. `activations` "mxfp8" rounds both products' inputs to MXFP8 values, as
    quantisation-aware training did; products of 4-bit weights are exact either way and sums are
    float32. Raises InputError.
    """
    if ids.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float32):
        raise InputError(f"ids {list(ids.shape)} must be [T, k], x {x.dtype} bfloat16 or float32")
    num_tokens, top_k = ids.shape
    num_experts, inner = experts.w1.scales.shape[:2]
    latent = experts.w2.scales.shape[1]
    check_tensor("x", x, (num_tokens, latent), ids.device)
    check_tensor("ids", ids, ids.shape, x.device, kind="integer")
    check_tensor("weights", weights, ids.shape, x.device)
    check_range("ids", ids, 0, num_experts)
    num_pairs = ids.numel()
    if num_pairs > MAX_PAIRS:
        raise InputError(f"{num_pairs} (token, expert) pairs; this kernel takes {MAX_PAIRS}")
    out = torch.empty_like(x)
    if not num_tokens:
        return out
    slots = min(num_experts, num_pairs)
    tables = _plan(ids.contiguous(), num_experts, slots)
    fp8 = activations == "mxfp8"
    rows, scale = _prepare(x.contiguous(), fp8)
    act = rows.new_empty(num_pairs, inner)
    tile = _tile(num_tokens, num_pairs, num_experts)
    meta = {"M": 32, "B": tile, "ASM": x.is_cuda, "num_warps": 1}
    launch(
        kernels.mxfp4_gate_up, (inner // 32, slots),
        rows, scale, *_pointers(experts.w1), *_pointers(experts.w3), act, *tables,
        beta1, beta2 or 0.0, top_k,
        K=latent, N=inner, CAP=beta2 is not None, FP8=fp8, **meta,
    )  # fmt: skip
    y = act.new_empty(num_pairs, latent, dtype=torch.float32)
    launch(
        kernels.mxfp4_down, (latent // 32, slots),
        act, *_pointers(experts.w2), y, *tables, K=inner, N=latent, **meta,
    )  # fmt: skip
    block = 512
    launch(
        kernels.combine_pairs, (num_tokens, -(-latent // block)),
        y, weights.contiguous(), out, N=latent, BLOCK=block, TOP_K=top_k, num_warps=4,
    )  # fmt: skip
    return out


def dequantised(matrix: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """W [E, N, K] of a packed matrix; exact in bfloat16."""
    num_experts, rows = matrix.scales.shape[:2]
    width = matrix.words.shape[2] * 128
    out = matrix.words.new_empty(num_experts, rows, width, dtype=dtype)
    launch(
        kernels.dequantise, (rows // 32, num_experts), *_pointers(matrix), out,
        K=width, N=rows, M=32, ASM=out.is_cuda, num_warps=1,
    )  # fmt: skip
    return out


def _pointers(matrix: PackedMatrix) -> tuple[Tensor, Tensor]:
    return matrix.words, matrix.scales


def _tile(num_tokens: int, num_pairs: int, num_experts: int) -> int:
    """Tokens a tile: enough for nearly every expert's share, since a second tile reads it again."""
    if num_tokens <= 8:
        return 8
    return 16 if num_tokens <= 16 or 2 * num_pairs < 24 * num_experts else 32


def _plan(ids: Tensor, num_experts: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """(active experts [slots], starts [slots + 1], pairs [P]), all int32."""
    num_pairs = ids.numel()
    active = ids.new_empty(slots, dtype=torch.int32)
    starts = ids.new_empty(slots + 1, dtype=torch.int32)
    pairs = ids.new_empty(num_pairs, dtype=torch.int32)
    p_pad = power_of_two(num_pairs, 2)
    launch(
        kernels.plan_tokens, (1,), ids, active, starts, pairs, num_pairs,
        E_PAD=power_of_two(num_experts, 2), P_PAD=p_pad, SLOTS=slots,
        S_PAD=power_of_two(slots + 1, 2),
        num_warps=max(1, min(16, p_pad // 128)),
    )  # fmt: skip
    return active, starts, pairs


def _prepare(x: Tensor, fp8: bool) -> tuple[Tensor, Tensor]:
    rows = torch.empty_like(x, dtype=torch.float16)
    scale = x.new_empty(x.shape[0], dtype=torch.float32)
    launch(
        kernels.prepare_tokens, (x.shape[0],), x, rows, scale,
        K=x.shape[1], K_PAD=power_of_two(x.shape[1], 2), FP8=fp8, num_warps=4,
    )  # fmt: skip
    return rows, scale
