"""KDA in Triton, step 2: the serial scans over tiles, forward and backward.

The state lives in registers as S^T [V rows, K] in float32. As the left operand of the tensor
cores it never passes through shared memory; the five matrices of a tile are right operands,
fetched ahead.

    forward   U = T V - W S          O = Q S + (P T) V         S  <- diag(gamma) S + kg^T U
    backward  Y = kg dS              dV = (P T)^T dO + T^T Y   dS <- diag(gamma) dS + Q^T dO - W^T Y

A program owns one segment of one head and V_ROWS columns of the state. With SUMMARY the segments of
a sequence run side by side: each from zero, and with the columns of the identity appended to the
state (v = 0 there), which yields the segment's transition matrix M; triton_segments folds them.

Legend: C = 16 tokens of a tile, BLOCK = 64 from one state checkpoint to the next, D head width, H
heads, N sequences.
"""

# Calls between jit functions look to a type checker like calls from Python.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl

from openk3.ops.kda.triton_math import first_slot, locate


@triton.jit(do_not_specialize=["tokens", "num_seqs", "segment"])
def scan_forward_kernel(
    v,
    wqk,
    tp,
    gamma,
    initial,  # [N, H, K, V] float32
    carry,  # [segments, H, V, K] float32: the state after a segment
    transition,  # [segments, H, K, K] float32: M^T
    cu,
    o,  # [rows, H, V]
    final,  # [N, H, K, V] float32
    u,  # [rows, H, V]
    checkpoints,  # [blocks, H, V, K]
    wanted,  # [blocks] int32: where a block's first state goes in `states`, or -1
    states,  # [P, H, V, K] float32
    tokens,
    num_seqs,
    H,
    segment,
    v_row,
    v_head,
    D: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    V_ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    SPLIT: tl.constexpr,
    SUMMARY: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    SAVE: tl.constexpr,
    HAS_WANTED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Fills o, final, u, checkpoints and states; with SUMMARY carry and transition instead.

    Long because a tile's loads must be in the loop that the compiler pipelines.
    """
    PARTS: tl.constexpr = D // V_ROWS
    COPIES: tl.constexpr = 2 * PARTS if SUMMARY else PARTS
    program = tl.program_id(0)
    part = program % COPIES
    h = (program // COPIES) % H
    slot = program // (COPIES * H)
    n, index, start, length = locate(slot, cu, tokens, num_seqs, segment, PACKED)
    first_token = index * segment
    if (index > 0) & (first_token >= length):
        return
    last = first_token + segment >= length
    is_identity = part >= PARTS
    if SUMMARY and (last | (is_identity & (index == 0))):
        return

    i = tl.arange(0, C)
    d = tl.arange(0, D)
    r = tl.arange(0, V_ROWS)
    column = (part % PARTS) * V_ROWS + r
    OPERAND: tl.constexpr = wqk.dtype.element_ty
    state = (n.to(tl.int64) * H + h) * (D * D) + d[None, :] * D + column[:, None]
    here = (slot.to(tl.int64) * H + h) * (D * D) + column[:, None] * D + d[None, :]
    S = tl.zeros([V_ROWS, D], tl.float32)
    if index == 0:
        if HAS_INITIAL and (not is_identity):
            S = tl.load(initial + state)
    elif SUMMARY:
        S = tl.where(is_identity & (column[:, None] == d[None, :]), 1.0, S)
    elif SPLIT:
        S = tl.load(carry + here - H * (D * D))

    num_tiles = tl.cdiv(tl.minimum(length - first_token, segment), C)
    tile0 = (first_slot(n, start, tokens, C, PACKED) + first_token // C).to(tl.int64)
    block0 = first_slot(n, start, tokens, BLOCK, PACKED) + first_token // (BLOCK)
    row0 = (start + first_token).to(tl.int64)
    left = tl.where(is_identity, 0, length - first_token)
    for t in tl.range(0, num_tiles, num_stages=STAGES):
        if (SAVE | HAS_WANTED) and (t * C % BLOCK == 0):
            block = block0 + t * C // BLOCK
            to = h * (D * D) + column[:, None] * D + d[None, :]
            if SAVE:
                block_at = checkpoints + block.to(tl.int64) * H * (D * D)
                tl.store(block_at + to, S.to(checkpoints.dtype.element_ty))
            if HAS_WANTED:
                p = tl.load(wanted + block)
                if p >= 0:
                    tl.store(states + p.to(tl.int64) * H * (D * D) + to, S)
        tile = (tile0 + t) * H + h
        tile_CD = wqk + tile * (3 * C * D) + i[:, None] * D + d[None, :]
        tile_CC = tp + tile * (2 * C * C) + i[:, None] * C + i[None, :]
        kg = tl.load(tile_CD + 2 * C * D)
        decay = tl.load(gamma + tile * D + d)
        row = row0 + t * C
        inside = (i < left - t * C)[:, None] & (column < D)[None, :]
        x = tl.load(
            v + row * v_row + h * v_head + i[:, None] * v_row + column[None, :], inside, 0.0
        )
        x = tl.trans(x.to(OPERAND))
        S_in = S.to(OPERAND)
        out = row * (H * D) + h * D + i[:, None] * (H * D) + column[None, :]
        if SUMMARY:
            U = tl.dot(x, tl.trans(tl.load(tile_CC)), input_precision=PRECISION)
            U = tl.dot(S_in, tl.trans(tl.load(tile_CD)), U, input_precision=PRECISION)
        else:  # U and O in one product
            i2 = tl.arange(0, 2 * C)
            WQ = tl.load(wqk + tile * (3 * C * D) + i2[:, None] * D + d[None, :])
            TP = tl.load(tp + tile * (2 * C * C) + i2[:, None] * C + i[None, :])
            y = tl.dot(x, tl.trans(TP), input_precision=PRECISION)
            y = tl.dot(S_in, tl.trans(WQ), y, input_precision=PRECISION)
            U, y = tl.split(tl.permute(tl.reshape(y, (V_ROWS, 2, C)), (0, 2, 1)))
            tl.store(o + out, tl.trans(y).to(o.dtype.element_ty), inside)
        U_in = U.to(OPERAND)
        if SAVE:
            tl.store(u + out, tl.trans(U_in).to(u.dtype.element_ty), inside)
        S = tl.dot(U_in, kg, S * decay[None, :], input_precision=PRECISION)

    if SUMMARY:
        if is_identity:
            tl.store(transition + here, S)
        else:
            tl.store(carry + here, S)
    elif HAS_FINAL and last:
        tl.store(final + state, S)


@triton.jit(do_not_specialize=["tokens", "num_seqs", "segment"])
def scan_backward_kernel(
    d_o,
    wqk,
    tp,
    gamma,
    d_final,  # [N, H, K, V] float32
    carry,  # [segments, H, V, K] float32: gradient of the state at a segment's start
    cu,
    dv,  # [rows, H, V]
    d_initial,  # [N, H, K, V] float32
    checkpoints,  # [blocks, H, V, K]: gradient of the state at a block's end
    tokens,
    num_seqs,
    H,
    segment,
    o_row,
    o_head,
    D: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    V_ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    SPLIT: tl.constexpr,
    SUMMARY: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Fills dv, d_initial and checkpoints; with SUMMARY carry instead.

    Long because a tile's loads must be in the loop that the compiler pipelines.
    """
    PARTS: tl.constexpr = D // V_ROWS
    program = tl.program_id(0)
    part = program % PARTS
    h = (program // PARTS) % H
    slot = program // (PARTS * H)
    n, index, start, length = locate(slot, cu, tokens, num_seqs, segment, PACKED)
    first_token = index * segment
    if (index > 0) & (first_token >= length):
        return
    last = first_token + segment >= length
    if SUMMARY and (index == 0):
        return

    i = tl.arange(0, C)
    d = tl.arange(0, D)
    column = part * V_ROWS + tl.arange(0, V_ROWS)
    OPERAND: tl.constexpr = wqk.dtype.element_ty
    state = (n.to(tl.int64) * H + h) * (D * D) + d[None, :] * D + column[:, None]
    here = (slot.to(tl.int64) * H + h) * (D * D) + column[:, None] * D + d[None, :]
    dS = tl.zeros([V_ROWS, D], tl.float32)
    if last:
        if HAS_FINAL:
            dS = tl.load(d_final + state)
    elif SPLIT and not SUMMARY:
        dS = tl.load(carry + here + H * (D * D))

    num_tiles = tl.cdiv(tl.minimum(length - first_token, segment), C)
    tile0 = (first_slot(n, start, tokens, C, PACKED) + first_token // C).to(tl.int64)
    block0 = first_slot(n, start, tokens, BLOCK, PACKED) + first_token // (BLOCK)
    row0 = (start + first_token).to(tl.int64)
    left = length - first_token
    for step in tl.range(0, num_tiles, num_stages=STAGES):
        t = num_tiles - 1 - step
        if (not SUMMARY) and ((step == 0) | ((t + 1) * C % BLOCK == 0)):
            block = (block0 + t * C // BLOCK).to(tl.int64)
            to = h * (D * D) + column[:, None] * D + d[None, :]
            block_at = checkpoints + block * H * (D * D)
            tl.store(block_at + to, dS.to(checkpoints.dtype.element_ty))
        tile = (tile0 + t) * H + h
        tile_CD = wqk + tile * (3 * C * D) + i[:, None] * D + d[None, :]
        tile_CC = tp + tile * (2 * C * C) + i[:, None] * C + i[None, :]
        minus_W = tl.load(tile_CD)
        Q = tl.load(tile_CD + C * D)
        kg = tl.load(tile_CD + 2 * C * D)
        decay = tl.load(gamma + tile * D + d)
        row = row0 + t * C
        inside = (i < left - t * C)[:, None] & (column < D)[None, :]
        x = tl.load(
            d_o + row * o_row + h * o_head + i[:, None] * o_row + column[None, :], inside, 0.0
        )
        x = tl.trans(x.to(OPERAND))
        Y = tl.dot(dS.to(OPERAND), tl.trans(kg), input_precision=PRECISION).to(OPERAND)
        if not SUMMARY:
            T = tl.load(tile_CC)
            PT = tl.load(tile_CC + C * C)
            dr = tl.dot(x, PT, input_precision=PRECISION)
            dr = tl.dot(Y, T, dr, input_precision=PRECISION)
            out = row * (H * D) + h * D + i[:, None] * (H * D) + column[None, :]
            tl.store(dv + out, tl.trans(dr).to(dv.dtype.element_ty), inside)
        dS = tl.dot(x, Q, dS * decay[None, :], input_precision=PRECISION)
        dS = tl.dot(Y, minus_W, dS, input_precision=PRECISION)

    if SUMMARY:
        tl.store(carry + here, dS)
    elif HAS_INITIAL and (index == 0):
        tl.store(d_initial + state, dS)
