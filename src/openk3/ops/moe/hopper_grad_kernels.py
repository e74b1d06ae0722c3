"""Weight gradients over rows sorted by expert, for Hopper GPUs (Gluon).

Legend: R padded rows, E experts, M x N the gradient, S stages, H warpgroups.
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


@gluon.jit
def _place(index, num_m, NUM_N: gl.constexpr, GROUP: gl.constexpr):
    """Tile number -> (row tile, column tile): GROUP row tiles share a sweep over the columns."""
    group = index // (GROUP * NUM_N)
    first = group * GROUP
    height = gl.minimum(num_m - first, GROUP)
    within = index - group * (GROUP * NUM_N)
    return first + within % height, within // height


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
    NUM_N: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    step = 0
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _, start, end, m, n = _grad_tile(index, order, starts, ends, NUM_M, NUM_N, GROUP)
        for row in range(start, end, BK):
            s = step % S
            mbarrier.wait(empty.index(s), (step // S + 1) & 1)
            bar = full.index(s)
            mbarrier.expect(bar, (64 * H + 256) * BK * 2)
            for h in gl.static_range(H):
                fetch(x, row, 64 * (H * m + h), bar, a.index(H * s + h))
            fetch(y, row, n * 256, bar, b.index(2 * s))
            fetch(y, row, n * 256 + 128, bar, b.index(2 * s + 1))
            step += 1


@gluon.jit
def _consume_grad(
    W: gl.constexpr, held, M: gl.constexpr, NUM_M: gl.constexpr, NUM_N: gl.constexpr,
    BK: gl.constexpr, S: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    out, a, b, c, full, empty, order, starts, ends, num_tiles = held
    WIDE: gl.constexpr = H == 2
    b = wide_blocks(b, WIDE, False)
    stage = c.index(W)
    step = 0
    for index in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, start, end, m, n = _grad_tile(index, order, starts, ends, NUM_M, NUM_N, GROUP)
        acc = zeros(WIDE)
        for row in range(start, end, BK):
            s = step % S
            mbarrier.wait(full.index(s), (step // S) & 1)
            left = a.index(H * s + W).permute((1, 0))
            acc = multiply(acc, left, b, s, WIDE, False)
            mbarrier.arrive(empty.index((step + S - 1) % S), count=1, pred=row > start)
            step += 1
        left, right = finish(acc, WIDE)
        mbarrier.arrive(empty.index((step + S - 1) % S), count=1, pred=end > start)
        at = 64 * (H * m + W)
        if at < M:
            store_tile(left.to(out.dtype), out, expert * M + at, n * 256, stage)
            store_tile(right.to(out.dtype), out, expert * M + at, n * 256 + 128, stage)
    tma.store_wait(pendings=0)


@gluon.jit
def grouped_weight_grad(
    x, y, out, order, starts, ends,
    M: gl.constexpr, N: gl.constexpr, E: gl.constexpr, BK: gl.constexpr,
    S: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """out [E M, N] = x_e^T y_e over expert e's rows; exact zeros for an expert without rows.

    Descriptors: x [BK, 64] of [R, M], y [BK, 128] of [R, N], out [64, 128]; M a multiple of 64.
    """
    NUM_M: gl.constexpr = (M + 64 * H - 1) // (64 * H)
    NUM_N: gl.constexpr = (N + 255) // 256
    dtype: gl.constexpr = x.dtype
    a = gl.allocate_shared_memory(dtype, [H * S, BK, 64], x.layout)
    b = gl.allocate_shared_memory(dtype, [2 * S, BK, 128], y.layout)
    c = gl.allocate_shared_memory(dtype, [H] + out.block_type.shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(S):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=H)
    fence_async_shared()
    num_tiles = E * NUM_M * NUM_N
    held = (out, a, b, c, full, empty, order, starts, ends, num_tiles)
    if H == 2:
        gl.warp_specialize([
            (_consume_grad, (0, held, M, NUM_M, NUM_N, BK, S, H, GROUP,)),
            (_consume_grad, (1, held, M, NUM_M, NUM_N, BK, S, H, GROUP,)),
            (_produce_grad, (
                x, y, a, b, full, empty, order, starts, ends, num_tiles, NUM_M, NUM_N, BK, S, H,
                GROUP,
            )),
        ], [4, 1], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume_grad, (0, held, M, NUM_M, NUM_N, BK, S, H, GROUP,)),
            (_consume_grad, (1, held, M, NUM_M, NUM_N, BK, S, H, GROUP,)),
            (_consume_grad, (2, held, M, NUM_M, NUM_N, BK, S, H, GROUP,)),
            (_produce_grad, (
                x, y, a, b, full, empty, order, starts, ends, num_tiles, NUM_M, NUM_N, BK, S, H,
                GROUP,
            )),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
