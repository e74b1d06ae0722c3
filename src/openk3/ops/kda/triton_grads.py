"""KDA in Triton, step 3 of the backward: gradients of q, k, g and beta, in parallel over blocks.

A block of 64 tokens needs only the state S at its start and the gradient dS at its end (the
scans' checkpoints), U and dV. With X = lower(dO U^T) and Z = strict_lower(dV U^T) [64, 64] and G
the running log-decay of the block:

    dq_t  =  e^{G_t} S dO_t + sum_{i<=t} e^{G_t-G_i} X_ti k_i
    dk_t  = -e^{G_t} S dV_t - sum_{i<t} e^{G_t-G_i} Z_ti k_i                          (k as reader)
            + e^{G_e-G_t} dS u_t + sum_{s>=t} e^{G_s-G_t} X_st q_s
                                 - sum_{s>t}  e^{G_s-G_t} Z_st k_s                    (k as writer)
    dg_t  = <S_e, dS>_V + sum_{s>=t} (q dq + k dk_reader - k dk_writer)_s
    dbeta_t = dV_t . u_t / beta_t

e^{G_t-G_i} is split at a pivot, the middle of the reader's half of 32 tokens: then both factors
stay within e^{+-80}, since inside the half 16 tokens lie on either side and earlier writers only
shrink. Products with rounded operands are multiplied by the same rounded operands, so that what
cancels in dg (the diagonal of X, pairs on one side of t) cancels to float32.

The columns of a head are processed BK at a time, to fit the registers. What couples them, the
products <q, dq> and <k, dk> of the L2 norms, is known beforehand: o is linear in q, and k enters
only through r = v - S^T k and the update, so <q, dq> = <o, dO> and <k, dk> = 2 <dV, u> / beta -
<dV, v>.

Legend: L = 64 tokens of a block, D head width, H heads.
"""

# Calls between jit functions look to a type checker like calls from Python.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl

from openk3.ops.kda.triton_math import (
    LOG2E,
    exp2,
    first_slot,
    locate,
    log2,
    sigmoid,
    to_bf16,
)


@triton.jit
def _sum_rows(ones, x, PRECISION: tl.constexpr):
    """ones [L, L] of 0 and 1, times x [L, BK] float32 in three pieces of bf16: no bit is lost."""
    if ones.dtype == tl.bfloat16:
        high = to_bf16(x)
        rest = x - high.to(tl.float32)
        middle = to_bf16(rest)
        low = to_bf16(rest - middle.to(tl.float32))
        return tl.dot(ones, high, tl.dot(ones, middle, tl.dot(ones, low)))
    else:  # noqa: RET505
        return tl.dot(ones, x, input_precision=PRECISION)


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
        return to_bf16(x)
    else:  # noqa: RET505
        return x.to(DTYPE)


@triton.jit(do_not_specialize=["tokens", "num_seqs"])
def grads_kernel(
    q,
    k,
    g,
    A_log,
    dt_bias,
    cu,
    u,
    d_o,
    dv,
    pairs,
    sums,
    norms,  # [rows, H, 2] float32: 1 / |q| and 1 / |k|
    gamma,  # [tiles, H, D] float32: decay of a tile
    ones,  # [L, L]: 1 on and below the diagonal
    starts,  # [blocks, H, V, K]: S at the block's start
    ends,  # [blocks, H, V, K]: dS at the block's end
    dq,  # out [rows, H, D]
    dk,
    dg,
    d_bias,  # out [blocks, H, D] float32: gradient of the gate's argument, summed over the block
    d_A_log,  # out [blocks, H] float32
    tokens,
    num_seqs,
    H,
    scale,
    lower_bound,
    q_row,
    q_head,
    k_row,
    k_head,
    g_row,
    g_head,
    o_row,
    o_head,
    D: tl.constexpr,
    L: tl.constexpr,
    BK: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of one head: dq, dk, dg and the block's share of d_A_log and d_bias.

    Long because all gradients use the same few products of a column group, which stay in registers.
    """
    OPERAND: tl.constexpr = pairs.dtype.element_ty
    program = tl.program_id(0)
    h = program % H
    slot = program // H
    n, index, start, length = locate(slot, cu, tokens, num_seqs, L, PACKED)
    if index * L >= length:
        return
    t = tl.arange(0, L)
    d = tl.arange(0, D)
    row = (start + index * L).to(tl.int64)
    left = length - index * L
    inside = (t < left)[:, None]
    first = t[:, None] < L // 2
    q += row * q_row + h * q_head
    k += row * k_row + h * k_head
    g += row * g_row + h * g_head
    d_o += row * o_row + h * o_head
    out = (row * H + h) * D
    dq += out
    dk += out
    dg += out
    here = slot.to(tl.int64) * H + h
    starts += here * (D * D)
    ends += here * (D * D)
    pairs += here * (2 * L * L)
    d_bias += here * D
    gamma += ((first_slot(n, start, tokens, L // 4, PACKED) + 4 * index).to(tl.int64) * H + h) * D
    norms += (row * H + h) * 2
    sums += (row * H + h) * 2
    rate = exp2(tl.load(A_log + h) * LOG2E)

    own = out + t[:, None] * (H * D) + d[None, :]
    U = tl.load(u + own, inside, 0.0).to(OPERAND)
    dR = tl.load(dv + own, inside, 0.0).to(OPERAND)
    dO = tl.load(d_o + t[:, None] * o_row + d[None, :], inside, 0.0).to(OPERAND)
    X = tl.load(pairs + t[:, None] * L + t[None, :])
    minus_Z = tl.load(pairs + L * L + t[:, None] * L + t[None, :])
    lower = tl.load(ones + t[:, None] * L + t[None, :])
    a_sum = 0.0
    for c in tl.range(0, D, BK, num_stages=1, disable_licm=True):
        j = c + tl.arange(0, BK)
        z = tl.load(g + t[:, None] * g_row + j[None, :], inside, 0.0).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(dt_bias + h * D + j)[None, :]
        decay = tl.where(inside, sigmoid(rate * z) * (lower_bound * LOG2E), 0.0)
        G = _sum_rows(lower, decay, PRECISION)
        # running log-decay after 16, 48 and 64 tokens
        tile0 = log2(tl.load(gamma + j))
        tile1 = log2(tl.load(gamma + H * D + j, (j < D) & (left > L // 4), 1.0))
        tile2 = log2(tl.load(gamma + 2 * H * D + j, (j < D) & (left > L // 2), 1.0))
        tile3 = log2(tl.load(gamma + 3 * H * D + j, (j < D) & (left > L * 3 // 4), 1.0))
        pivot1 = (tile0 + tile1 + tile2)[None, :]
        end = pivot1 + tile3[None, :]
        pivot = tl.where(first, tile0[None, :], pivot1)
        rows = exp2(G - pivot)
        back = exp2(pivot - G)
        to_pivot1 = exp2(pivot1 - G)
        from_start = exp2(G)
        q_rstd = tl.load(norms + t * (H * 2), t < left, 0.0)[:, None] * scale
        k_rstd = tl.load(norms + t * (H * 2) + 1, t < left, 0.0)[:, None]
        qn = tl.load(q + t[:, None] * q_row + j[None, :], inside, 0.0).to(tl.float32) * q_rstd
        kn = tl.load(k + t[:, None] * k_row + j[None, :], inside, 0.0).to(tl.float32) * k_rstd

        S = tl.load(starts + d[:, None] * D + j[None, :])  # [V, BK]
        at = t[:, None] * (H * D) + j[None, :]

        # Readers: what came from before the block through S, and pairs inside it. A row takes
        # the product of its own half's pivot; the other one is finite or dropped.
        out0 = _round(kn * back, OPERAND)  # for readers of the first half: writers of the second,
        out1 = _round(kn * to_pivot1, OPERAND)  # though finite, meet zeros of X and Z there
        past = from_start * tl.dot(dO, S, input_precision=PRECISION)
        inner = tl.dot(X, out0, input_precision=PRECISION)
        inner = tl.where(first, inner, tl.dot(X, out1, input_precision=PRECISION))
        q_in = _round(qn * rows, OPERAND)
        g_part = qn * past + q_in.to(tl.float32) * inner
        q_sum = tl.load(sums + t * (H * 2), t < left, 0.0)[:, None] / (scale * scale)
        grad = q_rstd * (past + rows * inner - qn * q_sum)
        tl.store(dq + at, grad.to(dq.dtype.element_ty), inside)
        past = from_start * tl.dot(dR, S, input_precision=PRECISION)
        inner = tl.dot(minus_Z, out0, input_precision=PRECISION)
        inner = tl.where(first, inner, tl.dot(minus_Z, out1, input_precision=PRECISION))
        k_in = _round(kn * rows, OPERAND)
        g_part += k_in.to(tl.float32) * inner - kn * past
        grad = rows * inner - past

        # writers: readers after the block through dS, and pairs inside it, by the reader's half
        half = tl.where(first, q_in, 0.0)
        written = tl.dot(tl.trans(X), half, input_precision=PRECISION)
        half = tl.where(first, k_in, 0.0)
        written = tl.dot(tl.trans(minus_Z), half, written, input_precision=PRECISION)
        g_part -= out0.to(tl.float32) * written
        grad += back * written
        half = tl.where(first, 0.0, q_in)
        written = tl.dot(tl.trans(X), half, input_precision=PRECISION)
        half = tl.where(first, 0.0, k_in)
        written = tl.dot(tl.trans(minus_Z), half, written, input_precision=PRECISION)
        g_part -= out1.to(tl.float32) * written
        grad += to_pivot1 * written
        dS = tl.load(ends + d[:, None] * D + j[None, :])
        written = exp2(end - G) * tl.dot(U, dS, input_precision=PRECISION)
        grad += written
        k_sum = tl.load(sums + t * (H * 2) + 1, t < left, 0.0)[:, None]
        k_grad = k_rstd * (grad - kn * k_sum)
        tl.store(dk + at, k_grad.to(dk.dtype.element_ty), inside)

        S = tl.load(starts + d[:, None] * D + j[None, :])
        E = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)[None, :]
        E *= exp2(end)
        E += tl.sum(g_part, 0)[None, :]
        g_part -= kn * written
        g_grad = E + g_part - _sum_rows(lower, g_part, PRECISION)
        # loaded again rather than kept in registers
        z = tl.load(g + t[:, None] * g_row + j[None, :], inside, 0.0).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(dt_bias + h * D + j)[None, :]
        gate = sigmoid(rate * z)
        x_grad = tl.where(inside, g_grad * lower_bound * gate * (1.0 - gate), 0.0)
        tl.store(dg + at, (rate * x_grad).to(dg.dtype.element_ty), inside)
        tl.store(d_bias + j, tl.sum(x_grad, 0))
        a_sum += tl.sum(tl.sum(x_grad * z, 1), 0)
    tl.store(d_A_log + here, rate * a_sum)
