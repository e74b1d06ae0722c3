"""Products of rows sorted by expert with that expert's weights, for Hopper GPUs (Gluon).

The tiles of the plan's list are handed out one by one, in order, by a counter in memory: programs
that meet low tiles take more of them, and all work on neighbours in the list, whose operands are in
the L2 cache. (Dealt out in advance, programs drift apart: a tenth of the rate.) The producer tells
its warpgroups what comes next through a queue of places in shared memory.

Legend: R padded rows, E experts, K summed width, N output width, S stages, H warpgroups.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from openk3.ops.moe.hopper_tile_kernels import (
    fetch,
    finish,
    multiply,
    store_tile,
    wide_blocks,
    zeros,
)

LOG2E = gl.constexpr(1.4426950408889634)
QUEUE = gl.constexpr(4)


@gluon.jit
def _find(index, tiles, NUM_N: gl.constexpr):
    """(row and height, expert, column tile): the row tiles of a group, all of one expert, share a
    sweep over the columns."""
    tile_expert, tile_row, tile_group = tiles
    group = gl.load(tile_group + index // NUM_N)
    within = index - group // 64 * NUM_N
    m = group // 64 + within % (group % 64)
    return gl.load(tile_row + m), gl.load(tile_expert + m), within // (group % 64)


@gluon.jit
def _announce(queue, order, code, n):
    """The producer's tile number `order`: rows and height as in the table (-1: no more), column."""
    codes, columns, ready, taken = queue
    place = order % QUEUE
    mbarrier.wait(taken.index(place), (order // QUEUE + 1) & 1)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    codes.index(place).store(gl.full([1], code, gl.int32, one))
    columns.index(place).store(gl.full([1], n, gl.int32, one))
    mbarrier.arrive(ready.index(place), count=1)


@gluon.jit
def _next(queue, order):
    """What `_announce` said: (code, column)."""
    codes, columns, ready, taken = queue
    place = order % QUEUE
    mbarrier.wait(ready.index(place), (order // QUEUE) & 1)
    four: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    code = gl.sum(codes.index(place).load(four), 0)
    n = gl.sum(columns.index(place).load(four), 0)
    mbarrier.arrive(taken.index(place), count=1)
    return code, n


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
def _fetch_rows(x, row, k, bar, a, s, height, H: gl.constexpr):
    """64 rows for each warpgroup that works on this tile."""
    for h in gl.static_range(H):
        to = a.index(H * s + h)
        tma.async_copy_global_to_shared(x, [row + 64 * h, k], bar, to, pred=h < height)


@gluon.jit
def _fetch_weights(
    w1, w3, first, k, n, bar, b, s, PAIR: gl.constexpr, TRANSPOSED: gl.constexpr
):  # fmt: skip
    """Two blocks of 128 columns: one of w1 and one of w3, or neighbours of w1."""
    if PAIR:
        fetch(w1, first + n * 128, k, bar, b.index(2 * s))
        fetch(w3, first + n * 128, k, bar, b.index(2 * s + 1))
    elif TRANSPOSED:
        fetch(w1, first + n * 256, k, bar, b.index(2 * s))
        fetch(w1, first + n * 256 + 128, k, bar, b.index(2 * s + 1))
    else:
        fetch(w1, first + k, n * 256, bar, b.index(2 * s))
        fetch(w1, first + k, n * 256 + 128, bar, b.index(2 * s + 1))


@gluon.jit
def _produce(
    x, x2, w1, w3, a, b, full, empty, queue, tiles, num_tiles, counter, PITCH: gl.constexpr,
    K: gl.constexpr, NUM_N: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, H: gl.constexpr,
    PAIR: gl.constexpr, DUAL: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    A_BYTES: gl.constexpr = 64 * BK * 2
    B_BYTES: gl.constexpr = 256 * BK * 2
    total = gl.load(num_tiles) * NUM_N
    step = 0
    order = 0
    index = gl.program_id(0)
    while index < total:
        code, expert, n = _find(index, tiles, NUM_N)
        _announce(queue, order, code, n)
        height, row = code % 64, code // 64 * 64
        for k in range(0, K, BK):
            s = step % S
            mbarrier.wait(empty.index(s), (step // S + 1) & 1)
            bar = full.index(s)
            for h in gl.static_range(H):
                mbarrier.expect(bar, (h + 1) * A_BYTES + B_BYTES, pred=height == h + 1)
            first = expert * PITCH
            if DUAL:
                if k < K // 2:
                    _fetch_rows(x, row, k, bar, a, s, height, H)
                    _fetch_weights(w1, w1, first, k, n, bar, b, s, PAIR, TRANSPOSED)
                else:
                    _fetch_rows(x2, row, k - K // 2, bar, a, s, height, H)
                    _fetch_weights(w3, w3, first, k - K // 2, n, bar, b, s, PAIR, TRANSPOSED)
            else:
                _fetch_rows(x, row, k, bar, a, s, height, H)
                _fetch_weights(w1, w3, first, k, n, bar, b, s, PAIR, TRANSPOSED)
            step += 1
        order += 1
        index = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
    _announce(queue, order, -1, 0)


@gluon.jit
def _consume(
    W: gl.constexpr, held, K: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, H: gl.constexpr,
    PAIR: gl.constexpr, TRANSPOSED: gl.constexpr, SAVE: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    out, gate, up, a, b, c, full, empty, queue, beta1, beta2 = held
    WIDE: gl.constexpr = H == 2
    K_LAST: gl.constexpr = PAIR or TRANSPOSED
    b = wide_blocks(b, WIDE, K_LAST)
    stage = c.index(W)
    step = 0
    order = 0
    code, n = _next(queue, order)
    while code >= 0:
        if code % 64 > W:
            acc = zeros(WIDE)
            for k in range(0, K, BK):
                s = step % S
                mbarrier.wait(full.index(s), (step // S) & 1)
                acc = multiply(acc, a.index(H * s + W), b, s, WIDE, K_LAST)
                mbarrier.arrive(empty.index((step + S - 1) % S), count=1, pred=k > 0)
                step += 1
            left, right = finish(acc, WIDE)
            mbarrier.arrive(empty.index((step + S - 1) % S), count=1)
            at = code // 64 * 64 + 64 * W
            if PAIR:
                if SAVE:
                    store_tile(left.to(out.dtype), gate, at, n * 128, stage)
                    store_tile(right.to(out.dtype), up, at, n * 128, stage)
                value = _situ(left, right, beta1, beta2, CAP)
                store_tile(value.to(out.dtype), out, at, n * 128, stage)
            else:
                store_tile(left.to(out.dtype), out, at, n * 256, stage)
                store_tile(right.to(out.dtype), out, at, n * 256 + 128, stage)
        else:
            for _ in range(0, K, BK):
                s = step % S
                mbarrier.wait(full.index(s), (step // S) & 1)
                mbarrier.arrive(empty.index(s), count=1)
                step += 1
        order += 1
        code, n = _next(queue, order)
    tma.store_wait(pendings=0)


@gluon.jit
def grouped_product(
    x, x2, w1, w3, out, gate, up, tiles, num_tiles, counter, beta1, beta2,
    PITCH: gl.constexpr, K: gl.constexpr, N: gl.constexpr, BK: gl.constexpr, S: gl.constexpr,
    H: gl.constexpr, PAIR: gl.constexpr, DUAL: gl.constexpr, TRANSPOSED: gl.constexpr,
    SAVE: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """Products of each row's expert, whose weights begin PITCH rows after the one before.

    tiles: three tables of the plan; num_tiles [1]; counter [1] zero.
    PAIR: out [R, N] = SiTU(x w1^T, x w3^T), with SAVE also both products. DUAL: out = x w1 + x2 w3,
    K counting both. Else out = x w1^T (TRANSPOSED) or x w1. All matrices are descriptors: x and x2
    [64, BK], w [128, BK] or [BK, 128], out, gate and up [64, 128].
    """
    NUM_N: gl.constexpr = (N + 127) // 128 if PAIR else (N + 255) // 256
    dtype: gl.constexpr = x.dtype
    a = gl.allocate_shared_memory(dtype, [H * S, 64, BK], x.layout)
    b = gl.allocate_shared_memory(dtype, [2 * S] + w1.block_type.shape, w1.layout)
    c = gl.allocate_shared_memory(dtype, [H] + out.block_type.shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(S):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=H)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    codes = gl.allocate_shared_memory(gl.int32, [QUEUE, 1], flat)
    columns = gl.allocate_shared_memory(gl.int32, [QUEUE, 1], flat)
    ready = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(QUEUE):
        mbarrier.init(ready.index(place), count=1)
        mbarrier.init(taken.index(place), count=H)
    fence_async_shared()
    queue = (codes, columns, ready, taken)
    held = (out, gate, up, a, b, c, full, empty, queue, beta1, beta2)
    if H == 2:
        gl.warp_specialize([
            (_consume, (0, held, K, BK, S, H, PAIR, TRANSPOSED, SAVE, CAP)),
            (_consume, (1, held, K, BK, S, H, PAIR, TRANSPOSED, SAVE, CAP)),
            (_produce, (
                x, x2, w1, w3, a, b, full, empty, queue, tiles, num_tiles, counter, PITCH, K, NUM_N,
                BK, S, H, PAIR, DUAL, TRANSPOSED,
            )),
        ], [4, 1], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (0, held, K, BK, S, H, PAIR, TRANSPOSED, SAVE, CAP)),
            (_consume, (1, held, K, BK, S, H, PAIR, TRANSPOSED, SAVE, CAP)),
            (_consume, (2, held, K, BK, S, H, PAIR, TRANSPOSED, SAVE, CAP)),
            (_produce, (
                x, x2, w1, w3, a, b, full, empty, queue, tiles, num_tiles, counter, PITCH, K, NUM_N,
                BK, S, H, PAIR, DUAL, TRANSPOSED,
            )),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
