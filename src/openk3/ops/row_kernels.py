"""Building blocks of Triton kernels that work on whole rows of D channels held in registers.

A row of N raw elements is a tuple of vectors [C], the last one masked: few vectors, because the
compiler's time grows with the cube of their number. PACKED rows are bfloat16 pairs in 32-bit words
(7168 channels: N = 3584 = 3.5 x 1024); they stay words until `parts` opens them into float32 (the
even channels of a vector, then the odd ones), because registers are what these kernels run out of.
Unpacked rows open into one part a vector. VEC is the number of neighbours one thread takes.
"""

import triton
import triton.language as tl


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def row_sums(vectors):
    """Sum each [C] vector of the tuple; one barrier for all of them."""
    if len(vectors) == 1:
        sums = (tl.sum(vectors[0], 0),)
    elif len(vectors) == 2:
        sums = tl.reduce(vectors, 0, _add2)
    elif len(vectors) == 3:
        sums = tl.reduce(vectors, 0, _add3)
    elif len(vectors) == 4:
        sums = tl.reduce(vectors, 0, _add4)
    else:
        sums = tl.reduce(vectors, 0, _add6)
    return sums


@triton.jit
def _offsets(i, C: tl.constexpr, VEC: tl.constexpr):
    return i * C + tl.max_contiguous(tl.arange(0, C), VEC)


@triton.jit
def _load(ptr, i, N: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr, EVICT: tl.constexpr):
    """Vector i of the row at ptr, zero past its end."""
    offs = _offsets(i, C, VEC)
    if (i + 1) * C <= N:
        x = tl.load(ptr + offs, eviction_policy=EVICT)
    else:
        x = tl.load(ptr + offs, mask=offs < N, other=0, eviction_policy=EVICT)
    return x


@triton.jit
def _store(ptr, i, x, N: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr):
    offs = _offsets(i, C, VEC)
    if (i + 1) * C <= N:
        tl.store(ptr + offs, x)
    else:
        tl.store(ptr + offs, x, mask=offs < N)


@triton.jit
def load_row(
    ptr, row, PACKED: tl.constexpr, N: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Row `row` of a contiguous matrix as its raw vectors."""
    if PACKED:
        ptr = ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    base = ptr + row * N
    out = ()
    for i in tl.static_range((N + C - 1) // C):
        out = out + (_load(base, i, N, C, VEC, EVICT),)
    return out


@triton.jit
def load_vector(
    ptr, PACKED: tl.constexpr, N: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """A float32 or bfloat16 vector as float32 parts that match an opened row's.

    Neighbours are loaded as one integer and taken apart, so that the parts lie where a row's do.
    """
    wide: tl.constexpr = ptr.dtype.element_ty == tl.float32
    if PACKED:
        ptr = ptr.to(tl.pointer_type(tl.int64 if wide else tl.int32), bitcast=True)
    out = ()
    for i in tl.static_range((N + C - 1) // C):
        x = _load(ptr, i, N, C, VEC, "evict_last")
        if PACKED:
            if wide:
                even = x.to(tl.int32).to(tl.float32, bitcast=True)
                odd = (x >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            else:
                even = (x << 16).to(tl.float32, bitcast=True)
                odd = (x & -65536).to(tl.float32, bitcast=True)
            out = out + (even, odd)
        else:
            out = out + (x.to(tl.float32),)
    return out


@triton.jit
def parts(row, PACKED: tl.constexpr):
    """Open raw vectors into float32 parts."""
    out = ()
    for i in tl.static_range(len(row)):
        if PACKED:
            even = (row[i] << 16).to(tl.float32, bitcast=True)
            odd = (row[i] & -65536).to(tl.float32, bitcast=True)
            out = out + (even, odd)
        else:
            out = out + (row[i].to(tl.float32),)
    return out


@triton.jit
def _pair(even, odd, ASM: tl.constexpr):
    """Two float32 rounded to nearest even and packed as bfloat16."""
    if ASM:
        word = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        low = even.to(tl.uint32, bitcast=True)
        high = odd.to(tl.uint32, bitcast=True)
        low = (low + 0x7FFF + ((low >> 16) & 1)) >> 16
        high = (high + 0x7FFF + ((high >> 16) & 1)) & 0xFFFF0000
        word = (low | high).to(tl.int32, bitcast=True)
    return word


@triton.jit
def close(row, dtype: tl.constexpr, PACKED: tl.constexpr, ASM: tl.constexpr):
    """Float32 parts rounded to raw vectors of the row's dtype."""
    out = ()
    if PACKED:
        for i in tl.static_range(len(row) // 2):
            out = out + (_pair(row[2 * i], row[2 * i + 1], ASM),)
    else:
        for i in tl.static_range(len(row)):
            out = out + (row[i].to(dtype),)
    return out


@triton.jit
def store_row(
    ptr, row, vectors, PACKED: tl.constexpr, N: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """Store raw vectors."""
    if PACKED:
        ptr = ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    base = ptr + row * N
    for i in tl.static_range((N + C - 1) // C):
        _store(base, i, vectors[i], N, C, VEC)


@triton.jit
def store_vector(
    ptr, vector, PACKED: tl.constexpr, N: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """Store float32 parts as a plain float32 vector."""
    if PACKED:
        ptr = ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    for i in tl.static_range((N + C - 1) // C):
        if PACKED:
            even = vector[2 * i].to(tl.uint32, bitcast=True).to(tl.int64)
            odd = vector[2 * i + 1].to(tl.uint32, bitcast=True).to(tl.int64)
            _store(ptr, i, (odd << 32) | even, N, C, VEC)
        else:
            _store(ptr, i, vector[i], N, C, VEC)


@triton.jit
def dot_part(a, b):
    """[C] partial sums of <a, b> over float32 parts, thread-local."""
    part = a[0] * b[0]
    for i in tl.static_range(1, len(a)):
        part += a[i] * b[i]
    return part


@triton.jit
def axpy(acc, x, scale):
    """acc + scale * x, part by part."""
    out = ()
    for i in tl.static_range(len(acc)):
        out = out + (acc[i] + scale * x[i],)
    return out


@triton.jit
def scaled(x, scale):
    out = ()
    for i in tl.static_range(len(x)):
        out = out + (scale * x[i],)
    return out


@triton.jit
def times(x, y):
    out = ()
    for i in tl.static_range(len(x)):
        out = out + (x[i] * y[i],)
    return out


@triton.jit
def zeros_like(x):
    out = ()
    for i in tl.static_range(len(x)):
        out = out + (tl.zeros_like(x[i]),)
    return out
