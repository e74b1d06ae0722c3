"""Rows of `ring_kernels`: their way through shared memory, their words, sums over them (Gluon).

Gluon cannot call Triton's functions, so sums of several vectors stand here as in `row_kernels.py`.
Letters: N words of two channels a row, C words a piece, T tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@gluon.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@gluon.jit
def _add6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@gluon.jit
def row_sums(vectors):
    """Sum each [C] vector of the tuple; one barrier for all of them."""
    if len(vectors) == 1:
        sums = (gl.sum(vectors[0], 0),)
    elif len(vectors) == 2:
        sums = gl.reduce(vectors, 0, _add2)
    elif len(vectors) == 3:
        sums = gl.reduce(vectors, 0, _add3)
    elif len(vectors) == 4:
        sums = gl.reduce(vectors, 0, _add4)
    else:
        sums = gl.reduce(vectors, 0, _add6)
    return sums


@gluon.jit
def words(pointer):
    return pointer.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def request(
    ring, place, stream, index: gl.constexpr, t, step, T, lane, N: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Begin to copy row `index` of the stream that starts at token t: one group of copies."""
    row = gl.minimum(t + index // len(stream) * step, T - 1)
    base = words(stream[index % len(stream)]) + row * N
    for i in gl.static_range((N + C - 1) // C):
        to = ring[i].index(place)
        if (i + 1) * C <= N:
            async_copy.async_copy_global_to_shared(to, base + i * C + lane)
        else:
            async_copy.async_copy_global_to_shared(to, base + i * C + lane, lane < N - i * C)
    async_copy.commit_group()


@gluon.jit
def make_ring(SLOTS: gl.constexpr, lanes: gl.constexpr, N: gl.constexpr, C: gl.constexpr):
    """Places for rows: one buffer [SLOTS, C] a piece, or a barrier would part any two copies."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = ()
    for i in gl.static_range((N + C - 1) // C):
        ring = ring + (gl.allocate_shared_memory(gl.int32, [SLOTS, C], flat),)
        if (i + 1) * C > N:  # what no copy writes
            for place in gl.static_range(SLOTS):
                ring[i].index(place).store(gl.zeros([C], gl.int32, lanes))
    return ring


@gluon.jit
def get(pointer, i, lane, N: gl.constexpr, C: gl.constexpr):
    """Piece i, zeros past the end."""
    if (i + 1) * C <= N:
        x = gl.load(pointer + i * C + lane)
    else:
        x = gl.load(pointer + i * C + lane, mask=lane < N - i * C, other=0)
    return x


@gluon.jit
def put(pointer, i, x, lane, N: gl.constexpr, C: gl.constexpr):
    if (i + 1) * C <= N:
        gl.store(pointer + i * C + lane, x)
    else:
        gl.store(pointer + i * C + lane, x, mask=lane < N - i * C)


@gluon.jit
def open_words(x):
    """Words -> their even and odd channels, float32."""
    even = (x << 16).to(gl.float32, bitcast=True)
    odd = (x & -65536).to(gl.float32, bitcast=True)
    return even, odd


@gluon.jit
def close_words(even, odd):
    """Two float32 rounded to nearest even, as one word."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def vector_of(pointer, lane, N: gl.constexpr, C: gl.constexpr):
    """A bfloat16 or float32 vector as pairs of float32 pieces, like an opened row."""
    out = ()
    for i in gl.static_range((N + C - 1) // C):
        if pointer.dtype.element_ty == gl.float32:
            pair = get(pointer.to(gl.pointer_type(gl.int64), bitcast=True), i, lane, N, C)
            even = pair.to(gl.int32).to(gl.float32, bitcast=True)
            odd = (pair >> 32).to(gl.int32).to(gl.float32, bitcast=True)
        else:
            even, odd = open_words(get(words(pointer), i, lane, N, C))
        out = out + (even, odd)
    return out


@gluon.jit
def key_of(query, norm_weight, lane, N: gl.constexpr, C: gl.constexpr):
    """The only way query and key-norm weight enter: their product, float32."""
    q, w = vector_of(query, lane, N, C), vector_of(norm_weight, lane, N, C)
    out = ()
    for i in gl.static_range(len(q)):
        out = out + (q[i] * w[i],)
    return out


@gluon.jit
def score_parts(ring, slot, key, lanes: gl.constexpr, N: gl.constexpr, C: gl.constexpr):
    """[C] partial sums of <row, row> and <row, key>."""
    square = gl.zeros([C], gl.float32, lanes)
    dot = gl.zeros([C], gl.float32, lanes)
    for i in gl.static_range((N + C - 1) // C):
        even, odd = open_words(ring[i].index(slot).load(lanes))
        square += even * even + odd * odd
        dot += even * key[2 * i] + odd * key[2 * i + 1]
    return square, dot


@gluon.jit
def add_row(acc, ring, slot, p, zero, lanes: gl.constexpr, N: gl.constexpr, C: gl.constexpr):
    """acc + p row. The row is read again: words kept since its score are registers."""
    out = ()
    for i in gl.static_range((N + C - 1) // C):
        even, odd = open_words(ring[i].index(slot).load(lanes) ^ zero)
        out = out + (acc[2 * i] + p * even, acc[2 * i + 1] + p * odd)
    return out


@gluon.jit
def scaled(x, scale):
    out = ()
    for i in gl.static_range(len(x)):
        out = out + (scale * x[i],)
    return out


@gluon.jit
def wrap(slot, SLOTS: gl.constexpr):
    return gl.where(slot >= SLOTS, slot - SLOTS, slot)
