"""Triton kernels of the routed experts' matrix products over rows sorted by expert.

Every expert's rows start at a multiple of 64 and are padded with zero rows, so that tiles never
straddle two experts and the weight gradient needs no mask. A table of row tiles, made on the device
(`permute_kernels.py`), tells each persistent program its expert and rows; nothing depends on counts
the host would have to know. A low tile costs as much as a high one here; only its rows are stored.

Legend: R padded rows, E experts, K summed width, N output width, BM x BN x BK the tile.
"""

import triton
import triton.language as tl

from openk3.ops.moe.situ_kernels import situ


@triton.jit
def _place(index, num_m, NUM_N: tl.constexpr, GROUP: tl.constexpr):
    """Tile number -> (row tile, column tile): GROUP row tiles share a sweep over the columns."""
    group = index // (GROUP * NUM_N)
    first = group * GROUP
    height = tl.minimum(num_m - first, GROUP)
    within = index - group * (GROUP * NUM_N)
    return first + within % height, within // height


@triton.jit
def _find(index, tiles, NUM_N: tl.constexpr):
    """(expert, first row, end, column tile); a group of row tiles shares a sweep over columns."""
    tile_expert, tile_row, tile_group = tiles
    group = tl.load(tile_group + index // NUM_N)
    within = index - group // 64 * NUM_N
    m = group // 64 + within % (group % 64)
    code = tl.load(tile_row + m)
    row = code // 64 * 64
    return tl.load(tile_expert + m), row, row + 64 * (code % 64), within // (group % 64)


@triton.jit
def grouped_situ(
    x, w1, w3, act, gate_up, tiles, num_tiles, beta1, beta2,
    PITCH: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SAVE: tl.constexpr, CAP: tl.constexpr, FLAT: tl.constexpr, ASM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """act [R, N] = SiTU(x w1^T, x w3^T); with SAVE also gate_up [R, 2 N].

    x [R, K] and w1, w3 [.., K] are descriptors with blocks [BM, BK], [BN, BK]; an expert's weights
    begin PITCH rows after the one before.
    """
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    num_m = tl.load(num_tiles)
    for index in tl.range(tl.program_id(0), num_m * NUM_N, tl.num_programs(0), flatten=FLAT):
        expert, row, end, n = _find(index, tiles, NUM_N)
        w_row = expert * PITCH + n * BN
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(0, K, BK):
            a = x.load([row, k])
            gate = tl.dot(a, w1.load([w_row, k]).T, gate, input_precision=PRECISION)
            up = tl.dot(a, w3.load([w_row, k]).T, up, input_precision=PRECISION)
        cols = n * BN + tl.arange(0, BN)
        rows = (row + tl.arange(0, BM)).to(tl.int64)
        keep = (rows < end)[:, None] & (cols < N)[None, :]
        if SAVE:
            offs = rows[:, None] * (2 * N) + cols[None, :]
            tl.store(gate_up + offs, gate.to(gate_up.dtype.element_ty), mask=keep)
            tl.store(gate_up + offs + N, up.to(gate_up.dtype.element_ty), mask=keep)
        value = situ(gate, up, beta1, beta2, CAP, act.dtype.element_ty == tl.float32, ASM)
        value = value.to(act.dtype.element_ty)
        tl.store(act + rows[:, None] * N + cols[None, :], value, mask=keep)


@triton.jit
def grouped_rows(
    x, w, out, tiles, num_tiles,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TRANSPOSED: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [R, N] = x w^T of w [E N, K] in blocks [BN, BK], or x w of w [E K, N] in [BK, BN]."""
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    num_m = tl.load(num_tiles)
    for index in tl.range(tl.program_id(0), num_m * NUM_N, tl.num_programs(0), flatten=FLAT):
        expert, row, end, n = _find(index, tiles, NUM_N)
        acc = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(0, K, BK):
            a = x.load([row, k])
            if TRANSPOSED:
                acc = tl.dot(a, w.load([expert * N + n * BN, k]).T, acc, input_precision=PRECISION)
            else:
                acc = tl.dot(a, w.load([expert * K + k, n * BN]), acc, input_precision=PRECISION)
        cols = n * BN + tl.arange(0, BN)
        rows = (row + tl.arange(0, BM)).to(tl.int64)
        tl.store(
            out + rows[:, None] * N + cols[None, :],
            acc.to(out.dtype.element_ty),
            mask=(rows < end)[:, None] & (cols < N)[None, :],
        )


@triton.jit
def grouped_weight_grad(
    a, b, out, order, starts, ends,
    M: tl.constexpr, N: tl.constexpr, E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out [E, M, N] = a_e^T b_e over expert e's rows; with ZERO one without rows gets exact zeros.

    a [R, M], b [R, N] are descriptors with blocks [BK, BM], [BK, BN]; experts in `order`.
    """
    NUM_M: tl.constexpr = (M + BM - 1) // BM
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    for index in tl.range(tl.program_id(0), E * NUM_M * NUM_N, tl.num_programs(0)):
        expert = tl.load(order + index // (NUM_M * NUM_N))
        m, n = _place(index % (NUM_M * NUM_N), NUM_M, NUM_N, GROUP)
        start = tl.load(starts + expert)
        end = tl.load(ends + expert)
        acc = tl.zeros([BM, BN], tl.float32)
        for row in tl.range(start, end, BK):
            acc = tl.dot(
                a.load([row, m * BM]).T, b.load([row, n * BN]), acc, input_precision=PRECISION
            )
        rows = m * BM + tl.arange(0, BM)
        cols = n * BN + tl.arange(0, BN)
        keep = (rows < M)[:, None] & (cols < N)[None, :]
        if not ZERO:
            keep = keep & (end > start)
        tl.store(
            out + (expert.to(tl.int64) * M + rows[:, None]) * N + cols[None, :],
            acc.to(out.dtype.element_ty),
            mask=keep,
        )
