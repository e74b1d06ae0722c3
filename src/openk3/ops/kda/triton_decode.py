"""KDA in Triton: one decoding step, with the state read and written once (see `decode`).

A program owns one head of one row and holds its whole state [K, V] in registers, in float32. Values
are rounded where the separate ops round: after the convolution and before the head norm.

Legend: D = K = V head width, H heads, W = 4 taps, P window capacity.
"""

# Calls between jit functions look to a type checker like calls from Python.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from openk3.ops.kda.decode import TAPS, Step
from openk3.ops.kda.triton_math import L2_EPS, LOG2E, exp2, sigmoid
from openk3.ops.triton_support import launch

NUM_WARPS = 4


@triton.jit
def _history(new, old, state, t, count, step, d):
    """The last four inputs of a convolution up to new token t, [4, D].

    They come from the new tokens, before those from `count` replayed ones, before those from the
    state; `old` may be None if count is 0.
    """
    p = t - 3 + tl.arange(0, 4)[:, None]
    x = tl.load(new + p * step + d, p >= 0, 0.0).to(tl.float32)
    if old is not None:
        x += tl.load(old + (p + count) * step + d, (p < 0) & (p + count >= 0), 0.0).to(tl.float32)
    p += count
    return x + tl.load(state + (4 + p) * step + d, p < 0, 0.0).to(tl.float32)


@triton.jit
def _convolve(x, w, DTYPE: tl.constexpr):
    """SiLU of the sum of x [4, D] times the taps w [4, D], rounded."""
    y = tl.sum(x * w, 0)
    return (y * sigmoid(y)).to(DTYPE).to(tl.float32)


@triton.jit
def _update(S, k, v, g, bias, d, b, rate, lower_bound):
    """The gated delta rule on S [K, V]: convolved k [K] and v [V], logits at g + d and b."""
    k *= tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)
    both = tl.arange(0, 2)[:, None]  # a sum of two rows, so that no thread loads them for itself
    x = tl.load(g + d, both == 0, 0.0).to(tl.float32) + tl.load(bias + d, both == 1, 0.0)
    S *= exp2(sigmoid(rate * tl.sum(x, 0)) * (lower_bound * LOG2E))[:, None]
    u = sigmoid(b) * (v - tl.sum(S * k[:, None], 0))
    return S + k[:, None] * u[None, :]


@triton.jit
def decode_kernel(
    q,
    k,
    v,
    g,
    beta,
    gate,
    conv_weight,  # [3, H, D, 4] float32
    conv_state,  # [S, 3, 4, H, D], conv_stride numbers from slot to slot
    state,  # [S, H, K, V] float32, state_stride from slot to slot
    slots,  # [B] int32
    A_log,
    dt_bias,
    norm_weight,
    old_q,  # [W, P, H, D], as old_k, old_v, old_g: the pending window
    old_k,
    old_v,
    old_g,
    old_beta,  # [W, P, H]
    accepted,  # [B] int32
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
    REPLAY: tl.constexpr,
):
    program = tl.program_id(0)
    h = program % H
    row = (program // H).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    d = tl.arange(0, D)
    step = H * D
    own = (row * tokens * H + h) * D
    o += own
    if slot < 0:
        for t in range(tokens):
            tl.store(o + t * step + d, tl.zeros([D], o.dtype.element_ty))
        return

    DTYPE: tl.constexpr = q.dtype.element_ty
    square = d[:, None] * D + d[None, :]
    state += slot * state_stride + h * (D * D)
    S = tl.load(state + square)
    d = d[None, :]
    taps = h * D * 4 + d * 4 + tl.arange(0, 4)[:, None]
    wq = tl.load(conv_weight + taps)
    wk = tl.load(conv_weight + step * 4 + taps)
    wv = tl.load(conv_weight + step * 8 + taps)
    q += own
    k += own
    v += own
    g += own
    gate += own
    beta += row * tokens * H + h
    state_q = conv_state + slot * conv_stride + h * D
    state_k = state_q + 4 * step
    state_v = state_q + 8 * step
    rate = exp2(tl.load(A_log + h) * LOG2E)
    dt_bias += h * D

    count = 0
    if REPLAY:
        window = tl.load(windows + row).to(tl.int64)
        old = (window * P * H + h) * D
        old_q += old
        old_k += old
        old_v += old
        old_g += old
        old_beta += window * P * H + h
        count = tl.load(accepted + row)
        for t in range(count):
            yk = _convolve(_history(old_k, None, state_k, t, 0, step, d), wk, DTYPE)
            yv = _convolve(_history(old_v, None, state_v, t, 0, step, d), wv, DTYPE)
            b = tl.load(old_beta + t * H).to(tl.float32)
            S = _update(S, yk, yv, old_g + t * step, dt_bias, d, b, rate, lower_bound)
        if count > 0:
            tl.store(state + square, S)

    moved = 0
    if advance is not None:
        moved = tl.load(advance + row)
    for t in range(tokens):
        yq = _convolve(_history(q, old_q, state_q, t, count, step, d), wq, DTYPE)
        yk = _convolve(_history(k, old_k, state_k, t, count, step, d), wk, DTYPE)
        yv = _convolve(_history(v, old_v, state_v, t, count, step, d), wv, DTYPE)
        b = tl.load(beta + t * H).to(tl.float32)
        S = _update(S, yk, yv, g + t * step, dt_bias, d, b, rate, lower_bound)
        if t + 1 == moved:
            tl.store(state + square, S)
        yq *= tl.rsqrt(tl.sum(yq * yq, 0) + L2_EPS) * scale
        y = tl.sum(S * yq[:, None], 0)[None, :].to(DTYPE).to(tl.float32)
        y *= tl.rsqrt(tl.sum(y * y, 1)[:, None] / D + eps) * tl.load(norm_weight + d)
        y *= sigmoid(tl.load(gate + t * step + d).to(tl.float32))
        tl.store(o + t * step + d, y.to(o.dtype.element_ty))

    # the convolutions' new states, and the new window; first everyone must have read the old ones
    last = moved - 1 if REPLAY else tokens - 1
    if REPLAY:
        xq = _history(q, old_q, state_q, last, count, step, d)
        xk = _history(k, old_k, state_k, last, count, step, d)
        xv = _history(v, old_v, state_v, last, count, step, d)
    else:
        tl.store(state + square, S)
        xq = _history(q, None, state_q, last, 0, step, d)
        xk = _history(k, None, state_k, last, 0, step, d)
        xv = _history(v, None, state_v, last, 0, step, d)
    tl.debug_barrier()
    to = tl.arange(0, 4)[:, None] * step + d
    tl.store(state_q + to, xq.to(DTYPE))
    tl.store(state_k + to, xk.to(DTYPE))
    tl.store(state_v + to, xv.to(DTYPE))
    if REPLAY:
        for t in range(tokens):
            at = t * step + d
            tl.store(old_q + at, tl.load(q + at))
            tl.store(old_k + at, tl.load(k + at))
            tl.store(old_v + at, tl.load(v + at))
            tl.store(old_g + at, tl.load(g + at))
            tl.store(old_beta + t * H, tl.load(beta + t * H))


@torch.no_grad()
def step_triton(step: Step) -> Tensor:
    """`decode.step_reference` in one kernel."""
    assert TAPS == 4, "the kernel spells out four taps"
    q, k, v, g, beta = (x.contiguous() for x in step.inputs)
    batch, tokens, heads, width = q.shape
    pending = step.pending if step.pending is not None else [None] * 5
    o = torch.empty_like(q, dtype=step.gate.dtype)
    launch(
        decode_kernel,
        (batch * heads,),
        q,
        k,
        v,
        g,
        beta,
        step.gate.contiguous(),
        step.conv_weight.float().contiguous(),
        step.conv_state,
        step.state,
        step.slots,
        step.A_log.float(),
        step.dt_bias.float(),
        step.norm_weight.float(),
        *pending,
        step.accepted,
        step.windows,
        step.advance,
        o,
        tokens=tokens,
        H=heads,
        P=0 if step.pending is None else step.pending.q.shape[1],
        conv_stride=step.conv_state.stride(0),
        state_stride=step.state.stride(0),
        scale=step.scale,
        lower_bound=step.lower_bound,
        eps=step.eps,
        D=width,
        REPLAY=step.pending is not None,
        num_warps=NUM_WARPS,
    )
    return o
