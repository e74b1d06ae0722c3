"""Building blocks of Triton kernels that work on whole rows of D channels held in registers.

A row is a tuple of [n, C] pieces whose n are the binary digits of D / C: 7168 = (4 + 2 + 1) x 1024,
so that no lane works on padding. VEC is the number of neighbours one thread takes, C / VEC the
number of threads. Loads keep the tensor's dtype; arithmetic is float32.
"""

import triton
import triton.language as tl


def row_pieces(dim: int) -> tuple[tuple[int, ...], int]:
    """(binary digits of dim / C, C) with C the largest power of two up to 1024 that divides dim."""
    c = min(1024, dim & -dim)
    n = dim // c
    return tuple(1 << b for b in reversed(range(n.bit_length())) if n >> b & 1), c


@triton.jit
def add1(a, b):
    return a + b


@triton.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def add6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def row_sums(parts):
    """Sum each [C] vector of the tuple; one barrier for all of them."""
    if len(parts) == 1:
        sums = (tl.reduce(parts[0], 0, add1),)
    elif len(parts) == 2:
        sums = tl.reduce(parts, 0, add2)
    elif len(parts) == 3:
        sums = tl.reduce(parts, 0, add3)
    elif len(parts) == 4:
        sums = tl.reduce(parts, 0, add4)
    else:
        sums = tl.reduce(parts, 0, add6)
    return sums


@triton.jit
def load_row(
    ptr,
    row,
    D: tl.constexpr,
    PIECES: tl.constexpr,
    C: tl.constexpr,
    VEC: tl.constexpr,
    EVICT: tl.constexpr,
):
    """Row `row` of a contiguous [*, D] tensor as a tuple of [n, C] pieces in its own dtype."""
    base = ptr + row * D
    pieces = ()
    start = 0
    for i in tl.static_range(len(PIECES)):
        cols = tl.max_contiguous(tl.arange(0, C), VEC)
        offs = start + tl.arange(0, PIECES[i])[:, None] * C + cols[None, :]
        pieces = pieces + (tl.load(base + offs, eviction_policy=EVICT),)
        start += PIECES[i] * C
    return pieces


@triton.jit
def store_row(
    ptr, row, pieces, D: tl.constexpr, PIECES: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr
):
    base = ptr + row * D
    start = 0
    for i in tl.static_range(len(PIECES)):
        cols = tl.max_contiguous(tl.arange(0, C), VEC)
        offs = start + tl.arange(0, PIECES[i])[:, None] * C + cols[None, :]
        tl.store(base + offs, pieces[i].to(ptr.dtype.element_ty))
        start += PIECES[i] * C


@triton.jit
def repack(x, zero, OPAQUE: tl.constexpr):
    """The same row, hidden from the optimizer: it stays packed instead of living on as float32."""
    out = ()
    for i in tl.static_range(len(x)):
        if OPAQUE:
            out = out + (
                tl.inline_asm_elementwise(
                    "or.b32 $0, $1, $2;",
                    "=r,r,r",
                    [x[i], zero],
                    dtype=x[i].dtype,
                    is_pure=True,
                    pack=2,
                ),
            )
        else:
            out = out + (x[i],)
    return out


@triton.jit
def dot_part(a, b):
    """[C] partial sums of <a, b>, thread-local."""
    part = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 0)
    for i in tl.static_range(1, len(a)):
        part += tl.sum(a[i].to(tl.float32) * b[i].to(tl.float32), 0)
    return part


@triton.jit
def axpy(acc, x, scale):
    """acc + scale * x, piece by piece, float32."""
    out = ()
    for i in tl.static_range(len(acc)):
        out = out + (acc[i] + scale * x[i].to(tl.float32),)
    return out


@triton.jit
def scaled(x, scale):
    out = ()
    for i in tl.static_range(len(x)):
        out = out + (scale * x[i].to(tl.float32),)
    return out


@triton.jit
def zeros_row(PIECES: tl.constexpr, C: tl.constexpr):
    out = ()
    for i in tl.static_range(len(PIECES)):
        out = out + (tl.zeros([PIECES[i], C], tl.float32),)
    return out
