"""KDA in Triton: decoding one token, with each state read and written once (see `decode`).

A program owns one head of one row and walks through the state some columns at a time, in registers.
Several small programs share a multiprocessor, so that some of them always wait for memory.

Values are rounded where the separate ops round: after the convolution and before the head norm.

Legend: D = K = V head width, H heads, W = 4 taps.
"""

# Calls between jit functions look to a type checker like calls from Python.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl

from openk3.ops.kda.triton_math import L2_EPS, LOG2E, exp2, sigmoid


@triton.jit
def _step_convolve(x, state, w, d, step, DTYPE: tl.constexpr):
    """SiLU of one token's four taps at channels d; shifts the state [4, H, D] by that token."""
    x0 = tl.load(state + step + d)
    x1 = tl.load(state + 2 * step + d)
    x2 = tl.load(state + 3 * step + d)
    x3 = tl.load(x + d)
    w += d
    y = tl.load(w) * x0.to(tl.float32) + tl.load(w + step) * x1.to(tl.float32)
    y += tl.load(w + 2 * step) * x2.to(tl.float32) + tl.load(w + 3 * step) * x3.to(tl.float32)
    tl.debug_barrier()  # everyone has read
    tl.store(state + d, x0)
    tl.store(state + step + d, x1)
    tl.store(state + 2 * step + d, x2)
    tl.store(state + 3 * step + d, x3.to(x0.dtype))
    return (y * sigmoid(y)).to(DTYPE).to(tl.float32)


@triton.jit
def step_kernel(
    q,
    k,
    v,
    g,
    beta,
    gate,
    taps,  # [3, 4, H, D] float32
    conv_state,  # [S, 3, 4, H, D], conv_stride numbers from slot to slot
    state,  # [S, H, K, V] float32, state_stride from slot to slot
    slots,  # [B] int32
    A_log,
    dt_bias,
    norm_weight,
    o,  # [B, 1, H, D]
    H,
    conv_stride,
    state_stride,
    scale,
    lower_bound,
    eps,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    h = program % H
    row = (program // H).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    d = tl.arange(0, D)
    j = tl.arange(0, COLUMNS)
    pieces = tl.arange(0, D // COLUMNS)[:, None]
    all_columns = pieces * COLUMNS + j[None, :]
    own = (row * H + h) * D
    if slot < 0:
        tl.store(o + own + d, tl.zeros([D], o.dtype.element_ty))
        return

    DTYPE: tl.constexpr = q.dtype.element_ty
    step = H * D
    state += slot * state_stride + h * (D * D)
    square = d[:, None] * D + j[None, :]
    conv_state += slot * conv_stride + h * D
    taps += h * D
    x = _step_convolve(q + own, conv_state, taps, d, step, DTYPE)
    x *= tl.rsqrt(tl.sum(x * x, 0) + L2_EPS) * scale
    y = _step_convolve(k + own, conv_state + 4 * step, taps + step * 4, d, step, DTYPE)
    y *= tl.rsqrt(tl.sum(y * y, 0) + L2_EPS)
    z = tl.load(g + own + d).to(tl.float32) + tl.load(dt_bias + h * D + d)
    rate = exp2(tl.load(A_log + h) * LOG2E)
    decay = exp2(sigmoid(rate * z) * (lower_bound * LOG2E))[:, None]
    b = sigmoid(tl.load(beta + row * H + h).to(tl.float32))
    xy = tl.sum(x * y, 0)
    x = x[:, None]
    y = y[:, None]
    out = tl.zeros([D // COLUMNS, COLUMNS], tl.float32)
    values = _step_convolve(
        v + own, conv_state + 8 * step, taps + step * 8, all_columns, step, DTYPE
    )
    for c in range(0, D, COLUMNS):
        S = tl.load(state + square + c) * decay
        value = tl.sum(tl.where(pieces * COLUMNS == c, values, 0.0), 0)
        u = b * (value - tl.sum(S * y, 0))
        part = tl.sum(S * x, 0) + xy * u
        tl.store(state + square + c, S + y * u[None, :])
        out = tl.where(pieces * COLUMNS == c, part[None, :], out)

    out = out.to(DTYPE).to(tl.float32)
    mean = tl.sum(tl.sum(out * out, 1), 0) / D
    out *= tl.rsqrt(mean + eps) * tl.load(norm_weight + all_columns)
    out *= sigmoid(tl.load(gate + own + all_columns).to(tl.float32))
    tl.store(o + own + all_columns, out.to(o.dtype.element_ty))
