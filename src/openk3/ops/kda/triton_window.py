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

from openk3.ops.kda.triton_math import L2_EPS, LOG2E, dot_halves, exp2, halves, sigmoid
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
    return tl.load(tl.where(p < 0, state + (4 + p) * step, source) + d).to(tl.float32)


@triton.jit
def _convolve(new, old, state, w, p, count, stop, step, d, DTYPE: tl.constexpr):
    """SiLU of four taps at positions p [C], rounded, [C, D]."""
    y = tl.load(w + d) * _inputs(new, old, state, p - 3, count, stop, step, d)
    y += tl.load(w + step + d) * _inputs(new, old, state, p - 2, count, stop, step, d)
    y += tl.load(w + 2 * step + d) * _inputs(new, old, state, p - 1, count, stop, step, d)
    y += tl.load(w + 3 * step + d) * _inputs(new, old, state, p, count, stop, step, d)
    return (y * sigmoid(y)).to(DTYPE).to(tl.float32)


@triton.jit
def window_kernel(
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
    taps += h * D
    count = 0
    kept = tokens  # the state advances by so many tokens
    if (old_q is not None) or (advance is not None):
        kept = 0
    if old_q is not None:
        window = tl.load(windows + row).to(tl.int64)
        old = (window * P * H + h) * D
        old_q += old
        old_k += old
        old_v += old
        old_g += old
        old_beta += window * P * H + h
    if accepted is not None:
        count = tl.load(accepted + row)
        kept = count
    if advance is not None:
        kept += tl.load(advance + row)
    stop = count + tokens
    new = (t >= count) & (t < stop)

    x = _convolve(q, old_q, state_q, taps, i, count, stop, step, d, DTYPE)
    x *= (tl.rsqrt(tl.sum(x * x, 1) + L2_EPS) * scale)[:, None]
    w = taps + step * 4
    y = _convolve(k, old_k, state_k, w, i, count, stop, step, d, DTYPE)
    y *= tl.where(i < stop, tl.rsqrt(tl.sum(y * y, 1) + L2_EPS), 0.0)[:, None]
    w += step * 4
    z = tl.load(g + (t - count) * step + d, new, 0.0).to(tl.float32)
    b = tl.load(beta + (i - count) * H, (i >= count) & (i < stop), 0.0).to(tl.float32)
    if accepted is not None:
        z += tl.load(old_g + t * step + d, t < count, 0.0).to(tl.float32)
        b += tl.load(old_beta + i * H, i < count, 0.0).to(tl.float32)
    b = tl.where(i < stop, sigmoid(b), 0.0)
    rate = exp2(tl.load(A_log + h) * LOG2E)
    decay = sigmoid(rate * (z + tl.load(dt_bias + h * D + d))) * (lower_bound * LOG2E)
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
    A = dot_halves(y, y_rest, z, z_rest, zero)
    A = tl.where(t > i[None, :], A * b[:, None], 0.0)
    T, T_rest = halves(unit_lower_inverse(A, C, PRECISION) * b[None, :])
    A = dot_halves(x, x_rest, z, z_rest, zero)
    A, A_rest = halves(tl.where(t >= i[None, :], A, 0.0))
    z, z_rest = halves(tl.trans(tl.where(t < kept, grown * whole[None, :], 0.0)))
    for c in tl.range(0, D, COLUMNS, num_stages=STAGES, disable_licm=True):
        columns = c + j
        square = tl.arange(0, D)[:, None] * D + columns
        S = tl.load(state + square)
        R, R_rest = halves(S)
        empty = tl.zeros([C, COLUMNS], tl.float32)
        U = _convolve(v, old_v, state_v, w, i, count, stop, step, columns, DTYPE)
        U, U_rest = halves(U - dot_halves(y, y_rest, R, R_rest, empty))
        U, U_rest = halves(dot_halves(T, T_rest, U, U_rest, empty))
        part = dot_halves(x, x_rest, R, R_rest, empty)
        part = dot_halves(A, A_rest, U, U_rest, part)
        tl.store(o + (t - count) * step + columns, part.to(DTYPE).to(o.dtype.element_ty), new)
        if kept > 0:
            S = dot_halves(z, z_rest, U, U_rest, S * whole[:, None])
            tl.store(state + square, S)

    tl.debug_barrier()  # everyone has written their columns, and read what is overwritten below
    at = (t - count) * step + d
    x = tl.load(o + at, new, 0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1)[:, None] / D + eps) * tl.load(norm_weight + d)
    x *= sigmoid(tl.load(gate + at, new, 0.0).to(tl.float32))
    tl.store(o + at, x.to(o.dtype.element_ty), new)

    # the convolutions' new states, and the new window
    last = kept - 4 + tl.arange(0, 4)
    xq = _inputs(q, old_q, state_q, last, count, stop, step, d)
    xk = _inputs(k, old_k, state_k, last, count, stop, step, d)
    xv = _inputs(v, old_v, state_v, last, count, stop, step, d)
    tl.debug_barrier()
    to = tl.arange(0, 4)[:, None] * step + d
    tl.store(state_q + to, xq.to(DTYPE))
    tl.store(state_k + to, xk.to(DTYPE))
    tl.store(state_v + to, xv.to(DTYPE))
    if old_q is not None:
        at = t * step + d
        inside = t < tokens
        tl.store(old_q + at, tl.load(q + at, inside), inside)
        tl.store(old_k + at, tl.load(k + at, inside), inside)
        tl.store(old_v + at, tl.load(v + at, inside), inside)
        tl.store(old_g + at, tl.load(g + at, inside), inside)
        tl.store(old_beta + i * H, tl.load(beta + i * H, i < tokens), i < tokens)
