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
def _taps(x, state, d, step):
    """The four inputs of a convolution: three of the state [4, H, D], and the token."""
    return (
        tl.load(state + step + d),
        tl.load(state + 2 * step + d),
        tl.load(state + 3 * step + d),
        tl.load(x + d),
    )


@triton.jit
def _mix(x, w, step, DTYPE: tl.constexpr):
    """SiLU of four taps, rounded. w: pointers to the weights of the first."""
    y = tl.load(w).to(tl.float32) * x[0].to(tl.float32)
    y += tl.load(w + step).to(tl.float32) * x[1].to(tl.float32)
    y += tl.load(w + 2 * step).to(tl.float32) * x[2].to(tl.float32)
    y += tl.load(w + 3 * step).to(tl.float32) * x[3].to(tl.float32)
    return (y * sigmoid(y)).to(DTYPE).to(tl.float32)


@triton.jit
def _shift(state, x, d, step):
    """The state [4, H, D] after the token."""
    tl.store(state + d, x[0])
    tl.store(state + step + d, x[1])
    tl.store(state + 2 * step + d, x[2])
    tl.store(state + 3 * step + d, x[3].to(x[0].dtype))


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


@triton.jit
def step_kernel(
    q,
    k,
    v,
    g,
    beta,
    gate,
    taps_q,  # [4, H, D], as taps_k and taps_v
    taps_k,
    taps_v,
    conv_state,  # [S, 3, 4, H, D], conv_stride numbers from slot to slot
    state,  # [S, H, K, V] float32, state_stride from slot to slot
    slots,  # [B] int32
    A_log,
    dt_bias,
    norm_weight,
    o,  # [B, 1, H, D]
    H,
    tap_step,
    channel_step,
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
    ahead = tl.load(state + square)
    conv_state += slot * conv_stride + h * D
    channel = (h * D + d) * channel_step
    raw_q = _taps(q + own, conv_state, d, step)  # all loads leave before the first is waited for
    raw_k = _taps(k + own, conv_state + 4 * step, d, step)
    raw_v = _taps(v + own, conv_state + 8 * step, all_columns, step)
    z = tl.load(g + own + d).to(tl.float32) + tl.load(dt_bias + h * D + d)
    b = sigmoid(tl.load(beta + row * H + h).to(tl.float32))
    rate = exp2(tl.load(A_log + h) * LOG2E)
    out_gate = tl.load(gate + own + all_columns).to(tl.float32)
    x = _mix(raw_q, taps_q + channel, tap_step, DTYPE)
    y = _mix(raw_k, taps_k + channel, tap_step, DTYPE)
    channel = (h * D + all_columns) * channel_step
    values = _mix(raw_v, taps_v + channel, tap_step, DTYPE)
    tl.debug_barrier()  # everyone has read
    _shift(conv_state, raw_q, d, step)
    _shift(conv_state + 4 * step, raw_k, d, step)
    _shift(conv_state + 8 * step, raw_v, all_columns, step)
    x *= tl.rsqrt(tl.sum(x * x, 0) + L2_EPS) * scale
    y *= tl.rsqrt(tl.sum(y * y, 0) + L2_EPS)
    decay = exp2(sigmoid(rate * z) * (lower_bound * LOG2E))[:, None]
    xy = tl.sum(x * y, 0)
    x = x[:, None]
    y = y[:, None]
    out = tl.zeros([D // COLUMNS, COLUMNS], tl.float32)
    for c in range(0, D, COLUMNS):
        S = ahead * decay
        value = tl.sum(tl.where(pieces * COLUMNS == c, values, 0.0), 0)
        old, part = tl.reduce((S * y, S * x), 0, _add)  # both sums through the same barriers
        u = b * (value - old)
        part += xy * u
        tl.store(state + square + c, S + y * u[None, :])
        ahead = tl.load(state + square + c + COLUMNS, c + COLUMNS + j[None, :] < D, 0.0)
        out = tl.where(pieces * COLUMNS == c, part[None, :], out)

    out = out.to(DTYPE).to(tl.float32)
    mean = tl.sum(tl.sum(out * out, 1), 0) / D
    out *= tl.rsqrt(mean + eps) * tl.load(norm_weight + all_columns)
    out *= sigmoid(out_gate)
    tl.store(o + own + all_columns, out.to(o.dtype.element_ty))
