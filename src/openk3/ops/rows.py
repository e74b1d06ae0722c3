"""How rows of D channels lie for the kernels of `row_kernels`, and what those are compiled for."""

from typing import Any

import torch
from torch import Tensor

from openk3.ops.triton_support import power_of_two


def row_layout(dim: int, dtype: torch.dtype) -> tuple[bool, int, int]:
    """(PACKED, N, C) for rows of `dim` channels."""
    packed = dtype == torch.bfloat16
    length = dim // 2 if packed else dim
    return packed, length, min(1024, power_of_two(length))


def few_warps(dim: int, dtype: torch.dtype) -> int:
    """Warps that share a row where more would each hold less than 64 words of a vector."""
    return max(1, min(8, row_layout(dim, dtype)[2] // 64))


def row_meta(x: Tensor, num_warps: int) -> dict[str, Any]:
    """What every row kernel is compiled for, on rows x [T, D]."""
    packed, n, c = row_layout(x.shape[1], x.dtype)
    return {
        "D": x.shape[1], "PACKED": packed, "N": n, "C": c, "VEC": max(1, c // (32 * num_warps)),
        "ASM": x.is_cuda, "num_warps": num_warps,
    }  # fmt: skip


def dense(x: Tensor) -> Tensor:
    """x as kernels read it: contiguous, from a multiple of 16 bytes on; a copy only if need be."""
    x = x.contiguous()
    return x.clone() if x.storage_offset() * x.element_size() % 16 else x


def dense_vector(w: Tensor) -> Tensor:
    """w [D] or [1, D] as `load_vector` reads it: `dense`, in float32 or bfloat16."""
    return dense(w.reshape(-1) if w.dtype == torch.bfloat16 else w.reshape(-1).float())
