"""What the warp-specialised kernels for Hopper GPUs share (Gluon).

One warp fetches tiles with the tensor memory accelerator, H = 2 or 3 warpgroups of four warps
multiply, each 64 rows of a tile of 256 columns. The producer runs ahead across tile boundaries, so
that fetching never stops for an epilogue, and the warpgroups drift apart, so that one stores while
another multiplies. Weights lie in shared memory as pairs of blocks of 128 columns: two warpgroups
take both in one instruction (WIDE); three have too few registers at entry for that, and take two.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def fetch(matrix, row, col, bar, to):
    """Begin to copy the tile at (row, col) of a matrix to shared memory; `bar` counts its bytes."""
    tma.async_copy_global_to_shared(matrix, [row, col], bar, to)


@gluon.jit
def store_tile(value, out, row, col, stage):
    """Registers -> shared memory -> out[row.., col..]; the previous store has left `stage`."""
    tma.store_wait(pendings=0)
    stage.store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, col], stage)


@gluon.jit
def zeros(WIDE: gl.constexpr):
    """Sums of a [64, 256] tile: one tensor, or its halves."""
    if WIDE:
        whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
        acc = (gl.zeros([64, 256], gl.float32, whole),)
    else:
        half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
        acc = (gl.zeros([64, 128], gl.float32, half), gl.zeros([64, 128], gl.float32, half))
    return acc


@gluon.jit
def multiply(acc, left, b, s, WIDE: gl.constexpr, K_LAST: gl.constexpr):
    """Begin acc + left b, and wait until the product before it has left its operands."""
    if WIDE:
        right = b.index(s)
        if K_LAST:
            right = right.permute((1, 0))
        out = warpgroup_mma(left, right, acc[0], is_async=True)
        acc = (warpgroup_mma_wait(num_outstanding=1, deps=[out]),)
    else:
        right = b.index(2 * s)
        right2 = b.index(2 * s + 1)
        if K_LAST:
            right = right.permute((1, 0))
            right2 = right2.permute((1, 0))
        out = warpgroup_mma(left, right, acc[0], is_async=True)
        out2 = warpgroup_mma(left, right2, acc[1], is_async=True)
        out, out2 = warpgroup_mma_wait(num_outstanding=2, deps=[out, out2])
        acc = (out, out2)
    return acc


@gluon.jit
def finish(acc, WIDE: gl.constexpr):
    """The halves of a finished tile."""
    if WIDE:
        whole = warpgroup_mma_wait(num_outstanding=0, deps=[acc[0]])
        halves = gl.split(gl.permute(gl.reshape(whole, [64, 2, 128]), (0, 2, 1)))
    else:
        halves = warpgroup_mma_wait(num_outstanding=0, deps=[acc[0], acc[1]])
    return halves


@gluon.jit
def wide_blocks(b, WIDE: gl.constexpr, K_LAST: gl.constexpr):
    """Buffers of two blocks of 128 columns as buffers of 256."""
    if WIDE:
        if K_LAST:
            b = b._reinterpret(b.dtype, [b.shape[0] // 2, 256, b.shape[2]], b.layout)
        else:
            b = b._reinterpret(b.dtype, [b.shape[0] // 2, b.shape[1], 256], b.layout)
    return b
