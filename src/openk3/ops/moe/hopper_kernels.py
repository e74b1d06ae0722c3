"""Warp-specialised products over rows sorted by expert, for Hopper GPUs (Gluon).

One warp fetches tiles with the tensor memory accelerator, two warpgroups of four warps multiply,
each 64 rows of a tile. The producer runs ahead across tile boundaries, so that fetching never stops
for an epilogue, and the warpgroups drift apart, so that one stores while the other multiplies. A
tile of 64 rows occupies the first warpgroup only.

Legend: R padded rows, E experts, K summed width, N output width, BN columns of a tile, S stages.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _place(index, num_m, NUM_N: gl.constexpr, GROUP: gl.constexpr):
    """Tile number -> (row tile, column tile): GROUP row tiles share a sweep over the columns."""
    group = index // (GROUP * NUM_N)
    first = group * GROUP
    height = gl.minimum(num_m - first, GROUP)
    within = index - group * (GROUP * NUM_N)
    return first + within % height, within // height


@gluon.jit
def _find(index, tables, num_big, num_small, NUM_N: gl.constexpr, GROUP: gl.constexpr):
    """(is a 128-row tile, expert, first row, column tile): the big tiles come first."""
    big_expert, big_row, small_expert, small_row = tables
    big = index < num_big * NUM_N
    rest = gl.where(big, index, index - num_big * NUM_N)
    m, n = _place(rest, gl.where(big, num_big, num_small), NUM_N, GROUP)
    if big:
        expert = gl.load(big_expert + m)
        row = gl.load(big_row + m)
    else:
        expert = gl.load(small_expert + m)
        row = gl.load(small_row + m)
    return big, expert, row, n


@gluon.jit
def _ex2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _rcp(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _situ(gate, up, beta1, beta2, CAP: gl.constexpr):
    """As `situ_kernels.situ` for results in 16 bits."""
    e = _ex2(gl.abs(gate) * (-2.0 * LOG2E / beta1))
    s = _ex2(gl.abs(gate) * -LOG2E)
    top = beta1 * (1.0 - e)
    top = gl.where(gate < 0, -top * s, top)
    bottom = (1 + e) * (1 + s)
    if CAP:
        v = _ex2(gl.abs(up) * (-2.0 * LOG2E / beta2))
        cap = beta2 * (1.0 - v)
        top = top * gl.where(up < 0, -cap, cap)
        bottom = bottom * (1 + v)
    else:
        top = top * up
    return top * _rcp(bottom)


@gluon.jit
def _fetch(matrix, row, col, bar, to):
    tma.async_copy_global_to_shared(matrix, [row, col], bar, to)


@gluon.jit
def _fetch_rows(x, row, k, bar, a, s, big):
    """64 rows for each warpgroup that works on this tile."""
    tma.async_copy_global_to_shared(x, [row, k], bar, a.index(2 * s))
    tma.async_copy_global_to_shared(x, [row + 64, k], bar, a.index(2 * s + 1), pred=big)


@gluon.jit
def _produce(
    x, x2, w1, w3, a, b, full, empty, tables, num_tiles, PITCH: gl.constexpr, K: gl.constexpr,
    NUM_N: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr,
    PAIR: gl.constexpr, DUAL: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = 64 * BK * 2
    B_BYTES: gl.constexpr = (2 if PAIR else 1) * BN * BK * 2
    num_big = gl.load(num_tiles)
    num_small = gl.load(num_tiles + 1)
    step = 0
    for index in range(gl.program_id(0), (num_big + num_small) * NUM_N, gl.num_programs(0)):
        big, expert, row, n = _find(index, tables, num_big, num_small, NUM_N, GROUP)
        for k in range(0, K, BK):
            s = step % S
            mbarrier.wait(empty.index(s), (step // S + 1) & 1)
            bar = full.index(s)
            mbarrier.expect(bar, 2 * HALF + B_BYTES, pred=big)
            mbarrier.expect(bar, HALF + B_BYTES, pred=big == 0)
            if DUAL:
                if k < K // 2:
                    _fetch_rows(x, row, k, bar, a, s, big)
                    _fetch(w1, expert * PITCH + k, n * BN, bar, b.index(s))
                else:
                    _fetch_rows(x2, row, k - K // 2, bar, a, s, big)
                    _fetch(w3, expert * PITCH + k - K // 2, n * BN, bar, b.index(s))
            else:
                _fetch_rows(x, row, k, bar, a, s, big)
                if PAIR:
                    _fetch(w1, expert * PITCH + n * BN, k, bar, b.index(2 * s))
                    _fetch(w3, expert * PITCH + n * BN, k, bar, b.index(2 * s + 1))
                elif TRANSPOSED:
                    _fetch(w1, expert * PITCH + n * BN, k, bar, b.index(s))
                else:
                    _fetch(w1, expert * PITCH + k, n * BN, bar, b.index(s))
            step += 1


@gluon.jit
def _store(value, out, row, col, stage):
    """Registers -> shared memory -> out[row.., col..]; the previous store has left `stage`."""
    tma.store_wait(pendings=0)
    stage.store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, col], stage)


@gluon.jit
def _store_halves(acc, out, row, col, stage, BN: gl.constexpr, DTYPE: gl.constexpr):
    """A [64, BN] tile through a buffer of half its width."""
    left, right = gl.split(gl.permute(gl.reshape(acc, [64, 2, BN // 2]), (0, 2, 1)))
    _store(left.to(DTYPE), out, row, col, stage)
    _store(right.to(DTYPE), out, row, col + BN // 2, stage)


@gluon.jit
def _consume(
    W: gl.constexpr, out, gate, up, a, b, c, full, empty, tables, num_tiles, beta1, beta2,
    K: gl.constexpr, NUM_N: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    S: gl.constexpr, GROUP: gl.constexpr, PAIR: gl.constexpr, TRANSPOSED: gl.constexpr,
    SAVE: gl.constexpr, CAP: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    num_big = gl.load(num_tiles)
    num_small = gl.load(num_tiles + 1)
    stage = c.index(W)
    step = 0
    for index in range(gl.program_id(0), (num_big + num_small) * NUM_N, gl.num_programs(0)):
        big, _, row, n = _find(index, tables, num_big, num_small, NUM_N, GROUP)
        if (W == 0) | big:
            acc = gl.full([64, BN], 0.0, gl.float32, mma)
            acc2 = gl.full([64, BN], 0.0, gl.float32, mma)
            for k in range(0, K, BK):
                s = step % S
                mbarrier.wait(full.index(s), (step // S) & 1)
                left = a.index(2 * s + W)
                if PAIR:
                    right = b.index(2 * s).permute((1, 0))
                    right2 = b.index(2 * s + 1).permute((1, 0))
                    acc = warpgroup_mma(left, right, acc, is_async=True)
                    acc2 = warpgroup_mma(left, right2, acc2, is_async=True)
                    acc, acc2 = warpgroup_mma_wait(num_outstanding=2, deps=[acc, acc2])
                else:
                    right = b.index(s)
                    if TRANSPOSED:
                        right = right.permute((1, 0))
                    acc = warpgroup_mma(left, right, acc, is_async=True)
                    acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
                mbarrier.arrive(empty.index((step + S - 1) % S), count=1, pred=k > 0)
                step += 1
            if PAIR:
                acc, acc2 = warpgroup_mma_wait(num_outstanding=0, deps=[acc, acc2])
            else:
                acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
            mbarrier.arrive(empty.index((step + S - 1) % S), count=1)
            at = row + 64 * W
            if PAIR:
                if SAVE:
                    _store(acc.to(DTYPE), gate, at, n * BN, stage)
                    _store(acc2.to(DTYPE), up, at, n * BN, stage)
                value = _situ(acc, acc2, beta1, beta2, CAP)
                _store(value.to(DTYPE), out, at, n * BN, stage)
            else:
                _store_halves(acc, out, at, n * BN, stage, BN, DTYPE)
        else:
            for _ in range(0, K, BK):
                s = step % S
                mbarrier.wait(full.index(s), (step // S) & 1)
                mbarrier.arrive(empty.index(s), count=1)
                step += 1
    tma.store_wait(pendings=0)


@gluon.jit
def grouped_product(
    x, x2, w1, w3, out, gate, up, big_expert, big_row, small_expert, small_row, num_tiles,
    beta1, beta2,
    PITCH: gl.constexpr, K: gl.constexpr, N: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    S: gl.constexpr, GROUP: gl.constexpr, PAIR: gl.constexpr, DUAL: gl.constexpr,
    TRANSPOSED: gl.constexpr, SAVE: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """Products of each row's expert, whose weights begin PITCH rows after the one before.

    PAIR: out [R, N] = SiTU(x w1^T, x w3^T), with SAVE also both products. DUAL: out = x w1 + x2 w3,
    K counting both. Else out = x w1^T (TRANSPOSED) or x w1. All matrices are descriptors: x and x2
    [64, BK], w [BN, BK] or [BK, BN], out, gate and up [64, 128].
    """
    NUM_N: gl.constexpr = (N + BN - 1) // BN
    dtype: gl.constexpr = x.dtype
    a = gl.allocate_shared_memory(dtype, [2 * S, 64, BK], x.layout)
    b = gl.allocate_shared_memory(dtype, [(2 if PAIR else 1) * S] + w1.block_type.shape, w1.layout)
    c = gl.allocate_shared_memory(dtype, [2] + out.block_type.shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(S):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    tables = (big_expert, big_row, small_expert, small_row)
    gl.warp_specialize(
        [
            (_consume, (
                0, out, gate, up, a, b, c, full, empty, tables, num_tiles, beta1, beta2, K,
                NUM_N, BN, BK, S, GROUP, PAIR, TRANSPOSED, SAVE, CAP, dtype,
            )),
            (_consume, (
                1, out, gate, up, a, b, c, full, empty, tables, num_tiles, beta1, beta2, K,
                NUM_N, BN, BK, S, GROUP, PAIR, TRANSPOSED, SAVE, CAP, dtype,
            )),
            (_produce, (
                x, x2, w1, w3, a, b, full, empty, tables, num_tiles, PITCH, K, NUM_N, BN, BK, S,
                GROUP, PAIR, DUAL, TRANSPOSED,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def _grad_tile(index, order, starts, ends, NUM_M: gl.constexpr, NUM_N: gl.constexpr,
               GROUP: gl.constexpr):  # fmt: skip
    """(expert, its rows, row tile, column tile), the experts with most rows first."""
    expert = gl.load(order + index // (NUM_M * NUM_N))
    m, n = _place(index % (NUM_M * NUM_N), NUM_M, NUM_N, GROUP)
    return expert, gl.load(starts + expert), gl.load(ends + expert), m, n


@gluon.jit
def _produce_grad(
    x, y, a, b, full, empty, order, starts, ends, num_tiles, NUM_M: gl.constexpr,
    NUM_N: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    step = 0
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _, start, end, m, n = _grad_tile(index, order, starts, ends, NUM_M, NUM_N, GROUP)
        for row in range(start, end, BK):
            s = step % S
            mbarrier.wait(empty.index(s), (step // S + 1) & 1)
            bar = full.index(s)
            mbarrier.expect(bar, (128 + BN) * BK * 2)
            _fetch(x, row, m * 128, bar, a.index(2 * s))
            _fetch(x, row, m * 128 + 64, bar, a.index(2 * s + 1))
            _fetch(y, row, n * BN, bar, b.index(s))
            step += 1


@gluon.jit
def _consume_grad(
    W: gl.constexpr, out, a, b, c, full, empty, order, starts, ends, num_tiles, M: gl.constexpr,
    NUM_M: gl.constexpr, NUM_N: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr,
    GROUP: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    stage = c.index(W)
    step = 0
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, start, end, m, n = _grad_tile(index, order, starts, ends, NUM_M, NUM_N, GROUP)
        acc = gl.full([64, BN], 0.0, gl.float32, mma)
        for row in range(start, end, BK):
            s = step % S
            mbarrier.wait(full.index(s), (step // S) & 1)
            left = a.index(2 * s + W).permute((1, 0))
            acc = warpgroup_mma(left, b.index(s), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
            mbarrier.arrive(empty.index((step + S - 1) % S), count=1, pred=row > start)
            step += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        mbarrier.arrive(empty.index((step + S - 1) % S), count=1, pred=end > start)
        at = m * 128 + 64 * W
        if at < M:
            _store_halves(acc, out, expert * M + at, n * BN, stage, BN, DTYPE)
    tma.store_wait(pendings=0)


@gluon.jit
def grouped_weight_grad(
    x, y, out, order, starts, ends,
    M: gl.constexpr, N: gl.constexpr, E: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    S: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """out [E M, N] = x_e^T y_e over expert e's rows; exact zeros for an expert without rows.

    Descriptors: x [BK, 64] of [R, M], y [BK, BN] of [R, N], out [64, 128]; M a multiple of 64.
    """
    NUM_M: gl.constexpr = (M + 127) // 128
    NUM_N: gl.constexpr = (N + BN - 1) // BN
    dtype: gl.constexpr = x.dtype
    a = gl.allocate_shared_memory(dtype, [2 * S, BK, 64], x.layout)
    b = gl.allocate_shared_memory(dtype, [S, BK, BN], y.layout)
    c = gl.allocate_shared_memory(dtype, [2] + out.block_type.shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(S):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    num_tiles = E * NUM_M * NUM_N
    gl.warp_specialize(
        [
            (_consume_grad, (
                0, out, a, b, c, full, empty, order, starts, ends, num_tiles, M, NUM_M, NUM_N, BN,
                BK, S, GROUP, dtype,
            )),
            (_consume_grad, (
                1, out, a, b, c, full, empty, order, starts, ends, num_tiles, M, NUM_M, NUM_N, BN,
                BK, S, GROUP, dtype,
            )),
            (_produce_grad, (
                x, y, a, b, full, empty, order, starts, ends, num_tiles, NUM_M, NUM_N, BN, BK, S,
                GROUP,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
