"""KDA in Triton, step 1: everything of a 16-token tile that does not need the state.

K3 report §2.1.1; the mathematics is in benchmarks/results/kda.md. With G the running log-decay of
the tile, k+ = k e^G, k- = k e^-G, q+ = q e^G, A = strict_lower(k+ k-^T), P = lower(q+ k-^T):

    T = (I + diag(beta) A)^-1 diag(beta)    W = T k+    Q = q+ - P W    kg = k e^(G_C - G)

The gate's bound of -5 a token keeps e^(+-G) inside e^(+-80), which float32 and bf16 hold, so no
rescaling is needed; values above the diagonal are finite and masked.

Legend: C = 16 tokens of a tile, D head width, H heads, N sequences, T tokens of a sequence.
"""

# Calls between jit functions look to a type checker like calls from Python.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl

from openk3.ops.kda.triton_math import L2_EPS, LOG2E, exp2, locate, reciprocal, sigmoid


@triton.jit
def unit_lower_inverse(N, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + N)^-1 of strictly lower N [16, 16]. PRECISION: of the products, at least 16 bits.

    The diagonal blocks of 8 by (I - B)(I + B^2)(I + B^4), exact since B^8 = 0; then, with X their
    inverse and L the rest, X - X L X. Equal keys without decay make the powers of B reach 20 (3432
    without blocks) and cancel.
    """
    i = tl.arange(0, C)
    same = (i[:, None] // 8) == (i[None, :] // 8)
    power = tl.where(same, N, 0.0)
    X = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - power
    power = tl.dot(power, power, input_precision=PRECISION)
    X = tl.dot(X, power, X, input_precision=PRECISION)
    power = tl.dot(power, power, input_precision=PRECISION)
    X = tl.dot(X, power, X, input_precision=PRECISION)
    rest = tl.dot(tl.where(same, 0.0, N), X, input_precision=PRECISION)
    return X - tl.dot(X, rest, input_precision=PRECISION)


@triton.jit(do_not_specialize=["tokens", "num_seqs"])
def prepare_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    cu,
    wqk,  # out [slots, H, 3, C, D]: -W, Q, kg
    tp,  # out [slots, H, 2, C, C]: T, P T
    gamma,  # out [slots, H, D] float32: decay of the whole tile
    rstd,  # out [rows, H, 2] float32: 1 / |q| and 1 / |k|, or None
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
    beta_row,
    beta_head,
    D: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SAVE_RSTD: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    SMALL_PRECISION: tl.constexpr,
):
    """One tile of one head.

    Long because it holds a whole derivation, each of whose matrices is used more than once.
    """
    program = tl.program_id(0)
    h = program % H
    slot = program // H
    _n, tile, start, length = locate(slot, cu, tokens, num_seqs, C, PACKED)
    if tile * C >= length:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, D)
    # rows past the end repeat the last one, with zero decay, key and beta: they change nothing
    valid = i < length - tile * C
    row = (start + tile * C).to(tl.int64)
    r = tl.minimum(i, length - tile * C - 1)

    z = tl.load(g + row * g_row + h * g_head + r[:, None] * g_row + d[None, :]).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(dt_bias + h * D + d)[None, :]
    rate = exp2(tl.load(A_log + h) * LOG2E) * LOG2E
    steepest = tl.where(valid, lower_bound * LOG2E, 0.0)[:, None]
    decay = steepest * reciprocal(1.0 + exp2(z * -rate))  # eq. 5, in log2
    G = tl.cumsum(decay, 0)
    whole = exp2(tl.sum(decay, 0))

    here = slot.to(tl.int64) * H + h
    tile_CD = wqk + here * (3 * C * D) + i[:, None] * D + d[None, :]
    x = tl.load(k + row * k_row + h * k_head + r[:, None] * k_row + d[None, :]).to(tl.float32)
    k_rstd = tl.where(valid, tl.rsqrt(tl.sum(x * x, 1) + L2_EPS), 0.0)
    x *= k_rstd[:, None] * exp2(-G)
    k_minus = x.to(OPERAND)
    tl.store(tile_CD + 2 * C * D, (x * whole[None, :]).to(OPERAND))
    shrink = exp2(G)
    k_plus = (x * shrink * shrink).to(OPERAND)
    y = tl.load(q + row * q_row + h * q_head + r[:, None] * q_row + d[None, :]).to(tl.float32)
    q_rstd = tl.rsqrt(tl.sum(y * y, 1) + L2_EPS)
    q_plus = y * (q_rstd * scale)[:, None] * shrink

    A = tl.dot(k_plus, tl.trans(k_minus), input_precision=PRECISION)
    P = tl.dot(q_plus.to(OPERAND), tl.trans(k_minus), input_precision=PRECISION)
    b = sigmoid(tl.load(beta + row * beta_row + h * beta_head + r * beta_row).to(tl.float32))
    b = tl.where(valid, b, 0.0)
    A = tl.where(i[:, None] > i[None, :], A * b[:, None], 0.0)
    P = tl.where(i[:, None] >= i[None, :], P, 0.0)
    T = unit_lower_inverse(A, C, SMALL_PRECISION) * b[None, :]
    PT = tl.dot(P, T, input_precision=SMALL_PRECISION)
    W = tl.dot(T.to(OPERAND), k_plus, input_precision=PRECISION)
    Q = tl.dot((-PT).to(OPERAND), k_plus, q_plus, input_precision=PRECISION)

    tl.store(tile_CD, (-W).to(OPERAND))
    tl.store(tile_CD + C * D, Q.to(OPERAND))
    tile_CC = tp + here * (2 * C * C) + i[:, None] * C + i[None, :]
    tl.store(tile_CC, T.to(OPERAND))
    tl.store(tile_CC + C * C, PT.to(OPERAND))
    tl.store(gamma + here * D + d, whole)
    if SAVE_RSTD:
        norms = rstd + ((row + i) * H + h) * 2
        tl.store(norms, q_rstd, valid)
        tl.store(norms + 1, k_rstd, valid)
