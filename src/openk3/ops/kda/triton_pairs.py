"""KDA in Triton, step 3 of the backward, first half: what the gradients of a 64-token block share.

The products X = lower(dO U^T) and Z = strict_lower(dV U^T) over all columns of a head, the row sums
that the gradients of the L2 norms need (see triton_grads for all of them), and dbeta.

Legend: L = 64 tokens of a block, D head width, H heads.
"""

# Calls between jit functions look to a type checker like calls from Python.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl

from openk3.ops.kda.triton_math import LOG2E, exp2, locate


@triton.jit(do_not_specialize=["tokens", "num_seqs"])
def pairs_kernel(
    v,
    beta,
    u,  # [rows, H, D]
    o,  # [rows, H, D]
    d_o,
    dv,  # [rows, H, D]
    cu,
    pairs,  # out [blocks, H, 2, L, L]: X and -Z
    sums,  # out [rows, H, 2] float32: <q, dq> and <k, dk>
    d_beta,  # out [rows, H]
    tokens,
    num_seqs,
    H,
    v_row,
    v_head,
    beta_row,
    beta_head,
    o_row,
    o_head,
    D: tl.constexpr,
    L: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """X, -Z, the row sums and dbeta of one block of one head."""
    program = tl.program_id(0)
    h = program % H
    slot = program // H
    _n, index, start, length = locate(slot, cu, tokens, num_seqs, L, PACKED)
    if index * L >= length:
        return
    OPERAND: tl.constexpr = pairs.dtype.element_ty
    t = tl.arange(0, L)
    d = tl.arange(0, D)
    row = (start + index * L).to(tl.int64)
    valid = t < length - index * L
    inside = valid[:, None]
    d_o += row * o_row + h * o_head
    v += row * v_row + h * v_head
    own_row = row * H + h
    own = t[:, None] * (H * D) + d[None, :]

    dR = tl.load(dv + own_row * D + own, inside, 0.0).to(OPERAND)
    U = tl.load(u + own_row * D + own, inside, 0.0).to(OPERAND)
    dO = tl.load(d_o + t[:, None] * o_row + d[None, :], inside, 0.0).to(OPERAND)
    X = tl.dot(dO, tl.trans(U), input_precision=PRECISION)
    Z = tl.dot(dR, tl.trans(U), input_precision=PRECISION)
    X = tl.where(t[:, None] >= t[None, :], X, 0.0).to(OPERAND)
    Z = tl.where(t[:, None] > t[None, :], Z, 0.0).to(OPERAND)
    pairs += (slot.to(tl.int64) * H + h) * (2 * L * L)
    tl.store(pairs + t[:, None] * L + t[None, :], X)
    tl.store(pairs + L * L + t[:, None] * L + t[None, :], -Z)

    x = tl.load(o + own_row * D + own, inside, 0.0).to(tl.float32)
    sums += own_row * 2 + t * (H * 2)
    tl.store(sums, tl.sum(dO.to(tl.float32) * x, 1), valid)
    dR = dR.to(tl.float32)
    du = tl.sum(dR * U.to(tl.float32), 1)
    x = tl.load(v + t[:, None] * v_row + d[None, :], inside, 0.0).to(tl.float32)
    b = tl.load(beta + row * beta_row + h * beta_head + t * beta_row, valid, 0.0).to(tl.float32)
    b = exp2(-tl.maximum(b, -80.0) * LOG2E)  # (1 - beta) / beta
    tl.store(sums + 1, 2 * du * (1 + b) - tl.sum(dR * x, 1), valid)
    tl.store(d_beta + own_row + t * H, (du * b).to(d_beta.dtype.element_ty), valid)
