"""KDA in Triton: decoding a window of tokens, behind the accepted ones of the window before.

All of them, at most 16, are one tile as in triton_tiles, with the state as the right operand: it is
read and written once whatever their number. Products keep 16 bits, in three pairs of bf16.

Values are rounded where the separate ops round: after the convolution and before the head norm.

Legend: D = K = V head width, H heads, W = 4 taps, P window capacity, C = 16 tokens of a tile.
"""

# Calls between jit functions look to a type checker like calls from Python.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl

from openk3.ops.kda.triton_math import (
    L2_EPS,
    LOG2E,
    dot_halves,
    dot_halves_apart,
    exp2,
    halves,
    sigmoid,
)
from openk3.ops.kda.triton_tiles import unit_lower_inverse


@triton.jit
def _inputs(new, old, state, p, count, stop, step, d):
    """Inputs [C, D] of a convolution at positions p [C] of the replayed and then the new tokens.

    `count` are replayed (`old` may be None if 0); before them comes the state. Behind the end
    (`stop`) the last one is repeated.
    """
    p = tl.minimum(p, stop - 1)[:, None]
    source = new + (p - count) * step
    if old is not None:
        source = tl.where(p < count, old + p * step, source)
    return tl.load(tl.where(p < 0, state + (4 + p) * step, source) + d)


@triton.jit
def _taps(new, old, state, w, tap_step, p, count, stop, step, d):
    """Weights of a convolution, from those of the first tap, w, and its inputs at positions p [C].

    Apart from `_mix`, so that all convolutions' loads are on their way before one is waited for.
    Weights come first: the compiler then moves them, not the inputs, between layouts.
    """
    return (
        tl.load(w).to(tl.float32),
        tl.load(w + tap_step).to(tl.float32),
        tl.load(w + 2 * tap_step).to(tl.float32),
        tl.load(w + 3 * tap_step).to(tl.float32),
        _inputs(new, old, state, p - 3, count, stop, step, d),
        _inputs(new, old, state, p - 2, count, stop, step, d),
        _inputs(new, old, state, p - 1, count, stop, step, d),
        _inputs(new, old, state, p, count, stop, step, d),
    )


@triton.jit
def _mix(x, DTYPE: tl.constexpr):
    """SiLU of four taps [C, D], rounded."""
    y = x[0] * x[4].to(tl.float32) + x[1] * x[5].to(tl.float32)
    y += x[2] * x[6].to(tl.float32) + x[3] * x[7].to(tl.float32)
    return (y * sigmoid(y)).to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "P"])
def window_kernel(
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
    old_q,  # [W, P, H, D], as old_k, old_v, old_g: the pending windows; None for none
    old_k,
    old_v,
    old_g,
    old_beta,  # [W, P, H]
    accepted,  # [B] int32, or None: no token of theirs is replayed
    windows,  # [B] int32
    advance,  # [B] int32 or None
    o,  # [B, T, H, D]
    tokens,
    H,
    tap_step,
    channel_step,
    P,
    conv_stride,
    state_stride,
    scale,
    lower_bound,
    eps,
    D: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One head of one row: o, and what the call leaves of the states and the pending window.

    Long because it is convolution, norms, gate, tile and head norm of the separate ops in one pass.
    """
    program = tl.program_id(0)
    h = program % H
    row = (program // H).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    i = tl.arange(0, C)
    t = i[:, None]
    d = tl.arange(0, D)[None, :]
    j = tl.arange(0, COLUMNS)[None, :]
    step = H * D
    own = (row * tokens * H + h) * D
    o += own
    # loads leave as early as they can, together: what a program does is mostly to wait for them
    count = 0
    kept = tokens  # the state advances by so many tokens
    if (old_q is not None) or (advance is not None):
        kept = 0
    if old_q is not None:
        window = tl.load(windows + row).to(tl.int64)
    if accepted is not None:
        count = tl.load(accepted + row)
        kept = count
    if advance is not None:
        kept += tl.load(advance + row)
    rate = exp2(tl.load(A_log + h) * LOG2E)
    if slot < 0:
        tl.store(o + t * step + d, tl.zeros([C, D], o.dtype.element_ty), t < tokens)
        return

    DTYPE: tl.constexpr = q.dtype.element_ty
    state += slot * state_stride + h * (D * D)
    q += own
    k += own
    v += own
    g += own
    gate += own
    beta += row * tokens * H + h
    state_q = conv_state + slot * conv_stride + h * D
    state_k = state_q + 4 * step
    state_v = state_q + 8 * step
    taps_v += h * D * channel_step
    channel = (h * D + d) * channel_step
    if old_q is not None:
        old = (window * P * H + h) * D
        old_q += old
        old_k += old
        old_v += old
        old_g += old
        old_beta += window * P * H + h
    stop = count + tokens
    new = (t >= count) & (t < stop)

    bias = tl.load(dt_bias + h * D + d)
    raw_q = _taps(q, old_q, state_q, taps_q + channel, tap_step, i, count, stop, step, d)
    raw_k = _taps(k, old_k, state_k, taps_k + channel, tap_step, i, count, stop, step, d)
    z = tl.load(g + (t - count) * step + d, new, 0.0).to(tl.float32)
    b = tl.load(beta + (i - count) * H, (i >= count) & (i < stop), 0.0).to(tl.float32)
    if accepted is not None:
        z += tl.load(old_g + t * step + d, t < count, 0.0).to(tl.float32)
        b += tl.load(old_beta + i * H, i < count, 0.0).to(tl.float32)
    x = _mix(raw_q, DTYPE)
    x *= (tl.rsqrt(tl.sum(x * x, 1) + L2_EPS) * scale)[:, None]
    y = _mix(raw_k, DTYPE)
    y *= tl.where(i < stop, tl.rsqrt(tl.sum(y * y, 1) + L2_EPS), 0.0)[:, None]
    b = tl.where(i < stop, sigmoid(b), 0.0)
    decay = sigmoid(rate * (z + bias)) * (lower_bound * LOG2E)
    decay = tl.where(t < stop, decay, 0.0)
    G = tl.cumsum(decay, 0)
    whole = exp2(tl.sum(tl.where(t < kept, decay, 0.0), 0))
    shrink = exp2(G)
    x *= shrink
    grown = y * exp2(-G)
    y *= shrink

    # the tile's own products, as in triton_tiles; then the state's, some columns at a time
    zero = tl.zeros([C, C], tl.float32)
    x, x_rest = halves(x)
    y, y_rest = halves(y)
    z, z_rest = halves(tl.trans(grown))
    A = dot_halves_apart(y, y_rest, z, z_rest, zero)
    A = tl.where(t > i[None, :], A * b[:, None], 0.0)
    T, T_rest = halves(unit_lower_inverse(A, C, PRECISION) * b[None, :])
    A = dot_halves_apart(x, x_rest, z, z_rest, zero)
    A, A_rest = halves(tl.where(t >= i[None, :], A, 0.0))
    z, z_rest = halves(tl.trans(tl.where(t < kept, grown * whole[None, :], 0.0)))
    for c in tl.range(0, D, COLUMNS, num_stages=STAGES, disable_licm=True):
        columns = c + j
        square = tl.arange(0, D)[:, None] * D + columns
        S = tl.load(state + square)
        R, R_rest = halves(S)
        empty = tl.zeros([C, COLUMNS], tl.float32)
        part = dot_halves_apart(x, x_rest, R, R_rest, empty)
        w = taps_v + columns * channel_step
        U = _taps(v, old_v, state_v, w, tap_step, i, count, stop, step, columns)
        U = _mix(U, DTYPE)
        U, U_rest = halves(U - dot_halves_apart(y, y_rest, R, R_rest, empty))
        U, U_rest = halves(dot_halves(T, T_rest, U, U_rest, empty))
        part = dot_halves(A, A_rest, U, U_rest, part)
        tl.store(o + (t - count) * step + columns, part.to(DTYPE).to(o.dtype.element_ty), new)
        if kept > 0:
            S = dot_halves(z, z_rest, U, U_rest, S * whole[:, None])
            tl.store(state + square, S)

    tl.debug_barrier()  # everyone has written their columns, and read what is overwritten below
    at = (t - count) * step + d
    x = tl.load(o + at, new, 0.0)
    z = tl.load(gate + at, new, 0.0)
    norm = tl.load(norm_weight + d)
    last = kept - 4 + tl.arange(0, 4)  # the convolutions' new states
    xq = _inputs(q, old_q, state_q, last, count, stop, step, d)
    xk = _inputs(k, old_k, state_k, last, count, stop, step, d)
    xv = _inputs(v, old_v, state_v, last, count, stop, step, d)
    tl.debug_barrier()
    to = tl.arange(0, 4)[:, None] * step + d
    tl.store(state_q + to, xq.to(DTYPE))
    tl.store(state_k + to, xk.to(DTYPE))
    tl.store(state_v + to, xv.to(DTYPE))
    if old_q is not None:  # the new window
        to = t * step + d
        inside = t < tokens
        new_q = tl.load(q + to, inside)
        new_k = tl.load(k + to, inside)
        new_v = tl.load(v + to, inside)
        new_g = tl.load(g + to, inside)
        new_beta = tl.load(beta + i * H, i < tokens)
        tl.store(old_q + to, new_q, inside)
        tl.store(old_k + to, new_k, inside)
        tl.store(old_v + to, new_v, inside)
        tl.store(old_g + to, new_g, inside)
        tl.store(old_beta + i * H, new_beta, i < tokens)

    x = x.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1)[:, None] / D + eps) * norm
    x *= sigmoid(z.to(tl.float32))
    tl.store(o + at, x.to(o.dtype.element_ty), new)
