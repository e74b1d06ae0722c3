"""Triton kernels of the text model's RMSNorm: one program walks rows of D channels.

The order of casts is the model's: normalise in float32, round to the tensor's dtype, multiply by
the weight. The backward pass recomputes 1/rms from x, so nothing but x is kept.
"""

import triton
import triton.language as tl

from openk3.ops.row_kernels import (
    axpy,
    close,
    dot_part,
    load_row,
    load_vector,
    parts,
    row_sums,
    scaled,
    store_row,
    store_vector,
    times,
    zeros_like,
)


@triton.jit(do_not_specialize=["T"])
def norm_forward(
    x_ptr, weight, out, T, eps,
    D: tl.constexpr, PACKED: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    VEC: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    start = tl.program_id(0).to(tl.int64)
    w = load_vector(weight, PACKED, N, C, VEC)
    for t in tl.range(start, T, tl.num_programs(0)):
        x = parts(load_row(x_ptr, t, PACKED, N, C, VEC, "evict_first"), PACKED)
        rstd = tl.rsqrt(row_sums((dot_part(x, x),))[0] / D + eps)
        unit = parts(close(scaled(x, rstd), dtype, PACKED, ASM), PACKED)
        y = close(times(unit, w), dtype, PACKED, ASM)
        store_row(out, t, y, PACKED, N, C, VEC)


@triton.jit(do_not_specialize=["T"])
def norm_backward(
    d_out, x_ptr, weight, d_x, d_weight, T, eps,
    D: tl.constexpr, PACKED: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    VEC: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """d_weight [programs, D] float32: partial sums of d_out * x / rms."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    start = tl.program_id(0).to(tl.int64)
    w = load_vector(weight, PACKED, N, C, VEC)
    grad_weight = zeros_like(w)
    for t in tl.range(start, T, tl.num_programs(0)):
        x = parts(load_row(x_ptr, t, PACKED, N, C, VEC, "evict_first"), PACKED)
        g = parts(load_row(d_out, t, PACKED, N, C, VEC, "evict_first"), PACKED)
        wg = times(w, g)
        sums = row_sums((dot_part(x, x), dot_part(x, wg)))
        rstd = tl.rsqrt(sums[0] / D + eps)
        grad = axpy(scaled(wg, rstd), x, -sums[1] / D * rstd * rstd * rstd)
        store_row(d_x, t, close(grad, dtype, PACKED, ASM), PACKED, N, C, VEC)
        grad_weight = axpy(grad_weight, times(x, g), rstd)
    store_vector(d_weight + start * D, grad_weight, PACKED, N, C, VEC)


@triton.jit
def sum_parts(
    parts, out, num_parts, D: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """out [D] = the column sums of parts [num_parts, D] float32, in a fixed order."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < D
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, num_parts, PARTS):
        rows = first + tl.arange(0, PARTS)
        mask = (rows < num_parts)[:, None] & keep[None, :]
        total += tl.sum(tl.load(parts + rows[:, None] * D + cols[None, :], mask=mask, other=0.0), 0)
    tl.store(out + cols, total, mask=keep)
