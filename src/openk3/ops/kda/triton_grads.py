"""KDA in Triton, step 3 of the backward: the gradients of one block of 64 tokens, all in parallel.

Needs only the state S at the block's start and its gradient dS at the block's end (checkpoints of
the scans), U and dV. With X = dO U^T and Z = dV U^T [64, 64] and G the running log-decay:

    dq_t  =  e^{G_t} S dO_t + sum_{i<=t} e^{G_t-G_i} X_ti k_i
    dk_t  = -e^{G_t} S dV_t - sum_{i<t} e^{G_t-G_i} Z_ti k_i                          (k as reader)
            + e^{G_e-G_t} dS u_t + sum_{s>=t} e^{G_s-G_t} X_st q_s
                                 - sum_{s>t}  e^{G_s-G_t} Z_st k_s                    (k as writer)
    dg_t  = <S_e, dS>_V + sum_{s>=t} (q dq + k dk_reader - k dk_writer)_s
    dbeta_t = dV_t . u_t / beta_t

e^{G_t-G_i} is split at a pivot, the middle of the reader's half of 32 tokens: then both factors stay
within e^{+-80}, since inside the half 16 tokens lie on either side and earlier writers only shrink.
Products with rounded operands are multiplied by the same rounded operands, so that what cancels in
dg (the diagonal of X, pairs on one side of t) cancels to float32.

The columns of a head are processed BK at a time, to fit the registers. What couples them, the
products <q, dq> and <k, dk> of the L2 norms, is known beforehand: o is linear in q, and k enters only
through r = v - S^T k and the update, so <q, dq> = <o, dO> and <k, dk> = 2 <dV, u> / beta - <dV, v>.

Legend: L = 64 tokens of a block, D head width, H heads.
"""

import triton
import triton.language as tl

from openk3.ops.kda.triton_math import LOG2E, exp2, first_slot, locate, sigmoid


@triton.jit
def _sum_rows(ones, x, PRECISION: tl.constexpr):
    """ones [L, L] of 0 and 1, times x [L, BK] float32 in three pieces, so that no bit is lost."""
    if ones.dtype == tl.bfloat16:
        high = x.to(tl.bfloat16)
        x -= high.to(tl.float32)
        middle = x.to(tl.bfloat16)
        total = tl.dot(ones, middle)
        total = tl.dot(ones, (x - middle.to(tl.float32)).to(tl.bfloat16), total)
        return tl.dot(ones, high, total)
    else:
        return tl.dot(ones, x, input_precision=PRECISION)


@triton.jit
def grads_kernel(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    cu,
    u,
    o,  # [rows, H, D]
    d_o,
    dv,  # [rows, H, D]
    rstd,  # [rows, H, 2] float32, of q and k
    totals,  # [tiles, H, D] float32: log2 decay of a tile
    starts,  # [blocks, H, V, K]: S at the block's start
    ends,  # [blocks, H, V, K]: dS at the block's end
    dq,  # [rows, H, D]
    dk,
    dg,
    d_beta,  # [rows, H]
    d_bias,  # [blocks, H, D] float32: sum over the block of d/d(exp(A_log) (z + bias))
    d_A_log,  # [blocks, H] float32
    tokens,
    num_seqs,
    H,
    scale,
    lower_bound,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    g_row,
    g_head,
    beta_row,
    beta_head,
    o_row,
    o_head,
    D: tl.constexpr,
    BK: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    L: tl.constexpr = 64
    program = tl.program_id(0)
    h = program % H
    slot = program // H
    n, index, start, length = locate(slot, cu, tokens, num_seqs, L, PACKED)
    if index * L >= length:
        return
    t = tl.arange(0, L)
    d = tl.arange(0, D)
    row = (start + index * L).to(tl.int64)
    valid = t < length - index * L
    inside = valid[:, None] & (d < D)[None, :]
    q += row * q_row + h * q_head
    k += row * k_row + h * k_head
    v += row * v_row + h * v_head
    g += row * g_row + h * g_head
    d_o += row * o_row + h * o_head
    out = row * (H * D) + h * D
    dq += out
    dk += out
    dg += out
    own = t[:, None] * (H * D) + d[None, :]
    own_rows = (row * H + h) + t * H

    q_rstd = tl.load(rstd + own_rows * 2, valid, 0.0)[:, None]
    k_rstd = tl.load(rstd + own_rows * 2 + 1, valid, 0.0)[:, None]
    dO = tl.load(d_o + t[:, None] * o_row + d[None, :], inside, 0.0).to(OPERAND)
    x = tl.load(o + out + own, inside, 0.0).to(tl.float32)
    q_sum = tl.sum(dO.to(tl.float32) * x, 1)[:, None]
    dR = tl.load(dv + out + own, inside, 0.0).to(OPERAND)
    x = tl.load(v + t[:, None] * v_row + d[None, :], inside, 0.0).to(tl.float32)
    k_sum = -tl.sum(dR.to(tl.float32) * x, 1)
    U = tl.load(u + out + own, inside, 0.0).to(OPERAND)
    ur = tl.sum(U.to(tl.float32) * dR.to(tl.float32), 1)
    b = tl.load(beta + (row + t) * beta_row + h * beta_head, valid, 0.0).to(tl.float32)
    b = exp2(-tl.maximum(b, -80.0) * LOG2E)  # (1 - beta) / beta
    tl.store(d_beta + own_rows, (ur * b).to(d_beta.dtype.element_ty), valid)
    k_sum = (k_sum + 2 * ur * (1 + b))[:, None]

    X = tl.dot(dO, tl.trans(U), input_precision=PRECISION)
    Z = tl.dot(dR, tl.trans(U), input_precision=PRECISION)
    X = tl.where(t[:, None] >= t[None, :], X, 0.0).to(OPERAND)
    Z = tl.where(t[:, None] > t[None, :], Z, 0.0).to(OPERAND)
    lower = tl.where(t[:, None] >= t[None, :], 1.0, 0.0).to(OPERAND)

    rate = exp2(tl.load(A_log + h) * LOG2E)
    here = slot.to(tl.int64) * H + h
    starts += here * (D * D)
    ends += here * (D * D)
    d_bias += here * D
    totals += ((first_slot(n, start, tokens, L // 4, PACKED) + 4 * index).to(tl.int64) * H + h) * D
    tiles_left = tl.cdiv(length - index * L, L // 4)
    a_sum = tl.zeros([L], tl.float32)
    for c in tl.range(0, D, BK, num_stages=STAGES, disable_licm=True):
        j = c + tl.arange(0, BK)
        cell = valid[:, None] & (j < D)[None, :]
        z = tl.load(g + t[:, None] * g_row + j[None, :], cell, 0.0).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(dt_bias + h * D + j)[None, :]
        gate = sigmoid(rate * z)
        G = _sum_rows(lower, tl.where(cell, gate * (lower_bound * LOG2E), 0.0), PRECISION)
        # running log-decay after 16, 48 and 64 tokens
        pivot0 = tl.load(totals + j)[None, :]
        total1 = tl.load(totals + H * D + j, (j < D) & (tiles_left > 1), 0.0)[None, :]
        total2 = tl.load(totals + 2 * H * D + j, (j < D) & (tiles_left > 2), 0.0)[None, :]
        total3 = tl.load(totals + 3 * H * D + j, (j < D) & (tiles_left > 3), 0.0)[None, :]
        pivot1 = pivot0 + total1 + total2
        end = pivot1 + total3
        qn = tl.load(q + t[:, None] * q_row + j[None, :], cell, 0.0).to(tl.float32)
        qn *= q_rstd
        kn = tl.load(k + t[:, None] * k_row + j[None, :], cell, 0.0).to(tl.float32)
        kn *= k_rstd

        # through the states at both ends of the block; dq is for the unit q, without `scale`
        S = tl.load(starts + d[:, None] * D + j[None, :])  # [V, BK]
        dS = tl.load(ends + d[:, None] * D + j[None, :])
        E = exp2(end) * tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)[None, :]
        from_start = exp2(G)
        q_grad = from_start * tl.dot(dO, S, input_precision=PRECISION)
        k_grad = -from_start * tl.dot(dR, S, input_precision=PRECISION)
        g_read = qn * (q_grad * scale) + kn * k_grad
        written = exp2(end - G) * tl.dot(U, dS, input_precision=PRECISION)
        k_grad += written
        g_write = kn * written

        # pairs inside the block, by the reader's half
        rows = exp2(G - tl.where(t[:, None] < 32, pivot0, pivot1))
        q_in = (qn * rows * scale).to(OPERAND)
        k_in = (kn * rows).to(OPERAND)
        xk = tl.zeros([L, BK], tl.float32)
        zk = tl.zeros([L, BK], tl.float32)
        for half in tl.static_range(2):
            if half == 0:  # later writers are masked in X and Z, but must not overflow
                cols = exp2(tl.where(t[:, None] < 32, pivot0 - G, 0.0))
            else:
                cols = exp2(pivot1 - G)
            # t < 32, said so that the masked copies of X and Z are not kept through the loop
            mine = (t[:, None] * D + c < 32 * D) == (half == 0)
            X_half = tl.where(mine, X, 0.0)
            Z_half = tl.where(mine, Z, 0.0)
            k_out = (kn * cols).to(OPERAND)
            xk = tl.dot(X_half, k_out, xk, input_precision=PRECISION)
            zk = tl.dot(Z_half, k_out, zk, input_precision=PRECISION)
            written = tl.dot(tl.trans(X_half), q_in, input_precision=PRECISION)
            written -= tl.dot(tl.trans(Z_half), k_in, input_precision=PRECISION)
            k_grad += cols * written
            g_read -= k_out.to(tl.float32) * written
        g_read += q_in.to(tl.float32) * xk - k_in.to(tl.float32) * zk
        q_grad += rows * xk
        k_grad -= rows * zk
        E += tl.sum(g_read, 0)[None, :]
        g_read -= g_write
        g_grad = E + g_read - _sum_rows(lower, g_read, PRECISION)

        q_grad = q_rstd * (scale * q_grad - qn * q_sum)
        tl.store(dq + t[:, None] * (H * D) + j[None, :], q_grad.to(dq.dtype.element_ty), cell)
        k_grad = k_rstd * (k_grad - kn * k_sum)
        tl.store(dk + t[:, None] * (H * D) + j[None, :], k_grad.to(dk.dtype.element_ty), cell)
        # loaded again rather than kept in registers
        z = tl.load(g + t[:, None] * g_row + j[None, :], cell, 0.0).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(dt_bias + h * D + j)[None, :]
        gate = sigmoid(rate * z)
        x_grad = tl.where(cell, g_grad * lower_bound * gate * (1.0 - gate), 0.0)
        z_grad = (rate * x_grad).to(dg.dtype.element_ty)
        tl.store(dg + t[:, None] * (H * D) + j[None, :], z_grad, cell)
        tl.store(d_bias + j, tl.sum(x_grad, 0))
        a_sum += tl.sum(x_grad * z, 1)
    tl.store(d_A_log + here, rate * tl.sum(a_sum, 0))
