"""Triton kernels of the short convolution with SiLU, forward and backward (see `ops.conv`).

A program owns a run of tokens of one sequence and some channels and walks along the run, four
tokens at a time (so that their loads are under way together), with the last three inputs in
registers: everything is read once. Backward it computes the sums before SiLU again and keeps three
unfinished gradients besides. Where a run lies follows from cu alone, as in kda.triton_math.

Legend: B batch, T tokens, D channels, W = 4 taps, N sequences, L tokens of a run.
"""

# Calls between jit functions look to a type checker like calls from Python.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl

from openk3.ops.kda.triton_math import locate, sigmoid


@triton.jit
def _load(x, t, stop, D, c):
    """Token t of x at channels c, float32 [C]; zero from token `stop` on."""
    return tl.load(x + t * D + c, (c < D) & (t < stop), 0.0).to(tl.float32)


@triton.jit
def _store_silu(y, t, stop, D, c, z):
    tl.store(y + t * D + c, (z * sigmoid(z)).to(y.dtype.element_ty), (c < D) & (t < stop))


@triton.jit
def _through_silu(z, dy):
    """dy -> dz."""
    gate = sigmoid(z)
    return dy * gate * (1 + z * (1 - gate))


@triton.jit
def _store_gradient(dx, d_initial, t, stop, index, D, c, grad, HAS_INITIAL: tl.constexpr):
    """Of token t of run `index`; of the initial state for the three before token 0 of run 0."""
    tl.store(dx + t * D + c, grad.to(dx.dtype.element_ty), (c < D) & (t >= 0) & (t < stop))
    if HAS_INITIAL:
        at = d_initial + (t + 4) * D + c
        tl.store(at, grad.to(d_initial.dtype.element_ty), (c < D) & (t < 0) & (index == 0))


@triton.jit
def _before(x, initial, back, index, D, c, HAS_INITIAL: tl.constexpr):
    """The input `back` tokens before a run, from the run before or the initial state, [C]."""
    y = tl.load(x - back * D + c, (c < D) & (index > 0), 0.0).to(tl.float32)
    if HAS_INITIAL:
        y += tl.load(initial + (4 - back) * D + c, (c < D) & (index == 0), 0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize=["tokens", "num_seqs"])
def conv_forward_kernel(
    x,
    weight,  # [4, D] float32
    initial,  # [N, 4, D]
    cu,
    y,
    tokens,
    num_seqs,
    D,
    C: tl.constexpr,
    L: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    n, index, start, length = locate(tl.program_id(0), cu, tokens, num_seqs, L, PACKED)
    if index * L >= length:
        return
    c = tl.program_id(1) * C + tl.arange(0, C)
    inside = c < D
    offset = (start + index * L).to(tl.int64) * D
    x += offset
    y += offset
    if HAS_INITIAL:
        initial += n.to(tl.int64) * 4 * D
    w0 = tl.load(weight + c, inside, 0.0)
    w1 = tl.load(weight + D + c, inside, 0.0)
    w2 = tl.load(weight + 2 * D + c, inside, 0.0)
    w3 = tl.load(weight + 3 * D + c, inside, 0.0)
    x0 = _before(x, initial, 3, index, D, c, HAS_INITIAL)
    x1 = _before(x, initial, 2, index, D, c, HAS_INITIAL)
    x2 = _before(x, initial, 1, index, D, c, HAS_INITIAL)
    stop = tl.minimum(length - index * L, L)
    for t in range(0, stop, 4):
        x3 = _load(x, t, stop, D, c)
        x4 = _load(x, t + 1, stop, D, c)
        x5 = _load(x, t + 2, stop, D, c)
        x6 = _load(x, t + 3, stop, D, c)
        _store_silu(y, t, stop, D, c, w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3)
        _store_silu(y, t + 1, stop, D, c, w0 * x1 + w1 * x2 + w2 * x3 + w3 * x4)
        _store_silu(y, t + 2, stop, D, c, w0 * x2 + w1 * x3 + w2 * x4 + w3 * x5)
        _store_silu(y, t + 3, stop, D, c, w0 * x3 + w1 * x4 + w2 * x5 + w3 * x6)
        x0 = x4
        x1 = x5
        x2 = x6


@triton.jit(do_not_specialize=["tokens", "num_seqs"])
def conv_backward_kernel(
    x,
    weight,  # [4, D] float32
    initial,
    dy,
    cu,
    dx,
    d_weight,  # [runs, 4, D] float32: sums over a run
    d_initial,  # [N, 4, D]
    tokens,
    num_seqs,
    D,
    C: tl.constexpr,
    L: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    """One run of some channels: dx, d_initial, and the run's share of d_weight.

    Long because the four tokens of a turn are spelled out: registers have names, not indices.
    """
    slot = tl.program_id(0)
    n, index, start, length = locate(slot, cu, tokens, num_seqs, L, PACKED)
    if (index > 0) & (index * L >= length):
        return
    c = tl.program_id(1) * C + tl.arange(0, C)
    inside = c < D
    left = length - index * L
    run = tl.minimum(left, L)
    offset = (start + index * L).to(tl.int64) * D
    x += offset
    dy += offset
    dx += offset
    if HAS_INITIAL:
        initial += n.to(tl.int64) * 4 * D
        d_initial += n.to(tl.int64) * 4 * D
        if index == 0:
            tl.store(d_initial + c, tl.zeros([C], d_initial.dtype.element_ty), inside)
    w0 = tl.load(weight + c, inside, 0.0)
    w1 = tl.load(weight + D + c, inside, 0.0)
    w2 = tl.load(weight + 2 * D + c, inside, 0.0)
    w3 = tl.load(weight + 3 * D + c, inside, 0.0)
    x0 = _before(x, initial, 3, index, D, c, HAS_INITIAL)
    x1 = _before(x, initial, 2, index, D, c, HAS_INITIAL)
    x2 = _before(x, initial, 1, index, D, c, HAS_INITIAL)
    zero = tl.zeros([C], tl.float32)
    s0 = zero
    s1 = zero
    s2 = zero
    s3 = zero
    g1 = zero  # what is known of the gradients of the inputs 1, 2 and 3 tokens back
    g2 = zero
    g3 = zero
    # three tokens past the run (zeros past the sequence) complete its last gradients
    for t in range(0, run + 3, 4):
        x3 = _load(x, t, left, D, c)
        x4 = _load(x, t + 1, left, D, c)
        x5 = _load(x, t + 2, left, D, c)
        x6 = _load(x, t + 3, left, D, c)
        e0 = _load(dy, t, left, D, c)
        e1 = _load(dy, t + 1, left, D, c)
        e2 = _load(dy, t + 2, left, D, c)
        e3 = _load(dy, t + 3, left, D, c)
        e0 = _through_silu(w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3, e0)
        e1 = _through_silu(w0 * x1 + w1 * x2 + w2 * x3 + w3 * x4, e1)
        e2 = _through_silu(w0 * x2 + w1 * x3 + w2 * x4 + w3 * x5, e2)
        e3 = _through_silu(w0 * x3 + w1 * x4 + w2 * x5 + w3 * x6, e3)
        done = g3 + w0 * e0
        _store_gradient(dx, d_initial, t - 3, run, index, D, c, done, HAS_INITIAL)
        done = g2 + w1 * e0 + w0 * e1
        _store_gradient(dx, d_initial, t - 2, run, index, D, c, done, HAS_INITIAL)
        done = g1 + w2 * e0 + w1 * e1 + w0 * e2
        _store_gradient(dx, d_initial, t - 1, run, index, D, c, done, HAS_INITIAL)
        done = w3 * e0 + w2 * e1 + w1 * e2 + w0 * e3
        _store_gradient(dx, d_initial, t, run, index, D, c, done, HAS_INITIAL)
        g3 = w3 * e1 + w2 * e2 + w1 * e3
        g2 = w3 * e2 + w2 * e3
        g1 = w3 * e3
        e0 = tl.where(t < run, e0, 0.0)
        e1 = tl.where(t + 1 < run, e1, 0.0)
        e2 = tl.where(t + 2 < run, e2, 0.0)
        e3 = tl.where(t + 3 < run, e3, 0.0)
        s0 += e0 * x0 + e1 * x1 + e2 * x2 + e3 * x3
        s1 += e0 * x1 + e1 * x2 + e2 * x3 + e3 * x4
        s2 += e0 * x2 + e1 * x3 + e2 * x4 + e3 * x5
        s3 += e0 * x3 + e1 * x4 + e2 * x5 + e3 * x6
        x0 = x4
        x1 = x5
        x2 = x6
    d_weight += slot.to(tl.int64) * 4 * D + c
    tl.store(d_weight, s0, inside)
    tl.store(d_weight + D, s1, inside)
    tl.store(d_weight + 2 * D, s2, inside)
    tl.store(d_weight + 3 * D, s3, inside)
