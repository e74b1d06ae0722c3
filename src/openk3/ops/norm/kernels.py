"""Triton kernels of the text model's RMSNorm: one program walks rows of D channels.

The order of casts is the model's: normalise in float32, round to the tensor's dtype, multiply by
the weight. The backward pass recomputes 1/rms from x, so nothing but x is kept.
"""

import triton
import triton.language as tl

from openk3.ops.row_kernels import axpy, dot_part, load_row, row_sums, scaled, store_row, zeros_row


@triton.jit
def norm_forward(
    x_ptr, weight, out, T, eps,
    D: tl.constexpr, PIECES: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    start = tl.program_id(0).to(tl.int64)
    w = load_row(weight, start * 0, D, PIECES, C, VEC, "evict_last")
    for t in tl.range(start, T, tl.num_programs(0)):
        x = load_row(x_ptr, t, D, PIECES, C, VEC, "evict_first")
        rstd = tl.rsqrt(row_sums((dot_part(x, x),))[0] / D + eps)
        y = ()
        for i in tl.static_range(len(PIECES)):
            unit = (x[i].to(tl.float32) * rstd).to(dtype).to(tl.float32)
            y = y + (unit * w[i].to(tl.float32),)
        store_row(out, t, y, D, PIECES, C, VEC)


@triton.jit
def norm_backward(
    d_out, x_ptr, weight, d_x, d_weight, T, eps,
    D: tl.constexpr, PIECES: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """d_weight [programs, D] float32: partial sums of d_out * x / rms."""
    start = tl.program_id(0).to(tl.int64)
    w = load_row(weight, start * 0, D, PIECES, C, VEC, "evict_last")
    grad_weight = zeros_row(PIECES, C)
    for t in tl.range(start, T, tl.num_programs(0)):
        x = load_row(x_ptr, t, D, PIECES, C, VEC, "evict_first")
        g = load_row(d_out, t, D, PIECES, C, VEC, "evict_first")
        wg = ()
        xg = ()
        for i in tl.static_range(len(PIECES)):
            wg = wg + (w[i].to(tl.float32) * g[i].to(tl.float32),)
            xg = xg + (x[i].to(tl.float32) * g[i].to(tl.float32),)
        sums = row_sums((dot_part(x, x), dot_part(x, wg)))
        rstd = tl.rsqrt(sums[0] / D + eps)
        grad = axpy(scaled(wg, rstd), x, -sums[1] / D * rstd * rstd * rstd)
        store_row(d_x, t, grad, D, PIECES, C, VEC)
        grad_weight = axpy(grad_weight, xg, rstd)
    store_row(d_weight, start, grad_weight, D, PIECES, C, VEC)


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
