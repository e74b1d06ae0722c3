"""Block AttnRes for NVIDIA GPUs of capability 8.0 and above: rows pass through a ring (Gluon).

One program walks tokens. The rows of its stream (all sources of a token, then those of its next
token) are copied asynchronously into SLOTS places in shared memory; a place is asked for again as
soon as its row has been used. Loads therefore stay in flight through every barrier, and registers
hold sums only: what `kernels.py` does, with the waiting taken out.

Every thread copies the very words that it will read. Gluon cannot call Triton's functions, so sums
of several vectors stand here as in `row_kernels.py`. Letters: T tokens, D channels, S sources,
N = D / 2 words of two channels a row, C words a piece, W warps.
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
def _row_sums(vectors):
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
def _words(pointer):
    return pointer.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def _request(
    ring, place, stream, index: gl.constexpr, t, step, T, lane, N: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Begin to copy row `index` of the stream that starts at token t: one group of copies."""
    row = gl.minimum(t + index // len(stream) * step, T - 1)
    base = _words(stream[index % len(stream)]) + row * N
    for i in gl.static_range((N + C - 1) // C):
        to = ring[i].index(place)
        if (i + 1) * C <= N:
            async_copy.async_copy_global_to_shared(to, base + i * C + lane)
        else:
            async_copy.async_copy_global_to_shared(to, base + i * C + lane, lane < N - i * C)
    async_copy.commit_group()


@gluon.jit
def _ring(SLOTS: gl.constexpr, lanes: gl.constexpr, N: gl.constexpr, C: gl.constexpr):
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
def _get(pointer, i, lane, N: gl.constexpr, C: gl.constexpr):
    """Piece i, zeros past the end."""
    if (i + 1) * C <= N:
        x = gl.load(pointer + i * C + lane)
    else:
        x = gl.load(pointer + i * C + lane, mask=lane < N - i * C, other=0)
    return x


@gluon.jit
def _put(pointer, i, x, lane, N: gl.constexpr, C: gl.constexpr):
    if (i + 1) * C <= N:
        gl.store(pointer + i * C + lane, x)
    else:
        gl.store(pointer + i * C + lane, x, mask=lane < N - i * C)


@gluon.jit
def _open(x):
    """Words -> their even and odd channels, float32."""
    even = (x << 16).to(gl.float32, bitcast=True)
    odd = (x & -65536).to(gl.float32, bitcast=True)
    return even, odd


@gluon.jit
def _close(even, odd):
    """Two float32 rounded to nearest even, as one word."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _vector(pointer, lane, N: gl.constexpr, C: gl.constexpr):
    """A bfloat16 or float32 vector as pairs of float32 pieces, like an opened row."""
    out = ()
    for i in gl.static_range((N + C - 1) // C):
        if pointer.dtype.element_ty == gl.float32:
            pair = _get(pointer.to(gl.pointer_type(gl.int64), bitcast=True), i, lane, N, C)
            even = pair.to(gl.int32).to(gl.float32, bitcast=True)
            odd = (pair >> 32).to(gl.int32).to(gl.float32, bitcast=True)
        else:
            even, odd = _open(_get(_words(pointer), i, lane, N, C))
        out = out + (even, odd)
    return out


@gluon.jit
def _key(query, norm_weight, lane, N: gl.constexpr, C: gl.constexpr):
    """The only way query and key-norm weight enter: their product, float32."""
    q, w = _vector(query, lane, N, C), _vector(norm_weight, lane, N, C)
    out = ()
    for i in gl.static_range(len(q)):
        out = out + (q[i] * w[i],)
    return out


@gluon.jit
def _score_parts(ring, slot, key, lanes: gl.constexpr, N: gl.constexpr, C: gl.constexpr):
    """[C] partial sums of <row, row> and <row, key>."""
    square = gl.zeros([C], gl.float32, lanes)
    dot = gl.zeros([C], gl.float32, lanes)
    for i in gl.static_range((N + C - 1) // C):
        even, odd = _open(ring[i].index(slot).load(lanes))
        square += even * even + odd * odd
        dot += even * key[2 * i] + odd * key[2 * i + 1]
    return square, dot


@gluon.jit
def _add_row(acc, ring, slot, p, zero, lanes: gl.constexpr, N: gl.constexpr, C: gl.constexpr):
    """acc + p row. The row is read again: words kept since its score are registers."""
    out = ()
    for i in gl.static_range((N + C - 1) // C):
        even, odd = _open(ring[i].index(slot).load(lanes) ^ zero)
        out = out + (acc[2 * i] + p * even, acc[2 * i + 1] + p * odd)
    return out


@gluon.jit
def _scaled(x, scale):
    out = ()
    for i in gl.static_range(len(x)):
        out = out + (scale * x[i],)
    return out


@gluon.jit
def _wrap(slot, SLOTS: gl.constexpr):
    return gl.where(slot >= SLOTS, slot - SLOTS, slot)


@gluon.jit
def mix_forward(
    sources, query, norm_weight, out, normed, out_weight, stats, T, eps, out_eps,
    D: gl.constexpr, N: gl.constexpr, C: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr,
    W: gl.constexpr, STORE_OUT: gl.constexpr, STORE_STATS: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """out [T, D]; stats [T, 2 S + 1] float32 = S scores, S reciprocal norms, log-sum-exp.

    GROUP rows share a barrier.
    """
    S: gl.constexpr = len(sources)
    lanes: gl.constexpr = gl.BlockedLayout([C // (32 * W)], [32], [W], [0])
    ring = _ring(SLOTS, lanes, N, C)
    lane = gl.arange(0, C, lanes)
    key = _key(query, norm_weight, lane, N, C)
    zero = T >> 31
    start = gl.program_id(0).to(gl.int64)
    step = gl.num_programs(0)
    for i in gl.static_range(SLOTS):
        _request(ring, i, sources, i, start, step, T, lane, N, C)
    slot = 0
    for t in range(start, T, step):
        peak = -float("inf")
        total = 0.0
        acc = ()
        for _ in gl.static_range(2 * ((N + C - 1) // C)):
            acc = acc + (gl.zeros([C], gl.float32, lanes),)
        for first in gl.static_range(0, S, GROUP):
            async_copy.wait_group(SLOTS - min(GROUP, S - first))
            vectors = ()
            for i in gl.static_range(min(GROUP, S - first)):
                vectors = vectors + _score_parts(ring, _wrap(slot + i, SLOTS), key, lanes, N, C)
            sums = _row_sums(vectors)
            top = peak
            scores = ()
            for i in gl.static_range(min(GROUP, S - first)):
                rstd = gl.rsqrt(sums[2 * i] / D + eps)
                scores = scores + (sums[2 * i + 1] * rstd,)
                top = gl.maximum(top, scores[i])
                if STORE_STATS:
                    gl.store(stats + t * (2 * S + 1) + first + i, scores[i])
                    gl.store(stats + t * (2 * S + 1) + S + first + i, rstd)
            if first > 0:
                decay = gl.exp(peak - top)
                total = total * decay
                acc = _scaled(acc, decay)
            peak = top
            gl.thread_barrier()  # or the compiler keeps the rows in registers instead
            for i in gl.static_range(min(GROUP, S - first)):
                p = gl.exp(scores[i] - top)
                total += p
                acc = _add_row(acc, ring, _wrap(slot + i, SLOTS), p, zero, lanes, N, C)
            for i in gl.static_range(min(GROUP, S - first)):
                place = _wrap(slot + i, SLOTS)
                _request(ring, place, sources, first + i + SLOTS, t, step, T, lane, N, C)
            slot = _wrap(slot + min(GROUP, S - first), SLOTS)
        if STORE_STATS:
            gl.store(stats + t * (2 * S + 1) + 2 * S, peak + gl.log(total))
        scale = 1.0 / total
        mixed = ()
        square = gl.zeros([C], gl.float32, lanes)
        for i in gl.static_range((N + C - 1) // C):
            word = _close(acc[2 * i] * scale, acc[2 * i + 1] * scale)
            mixed = mixed + (word,)
            if STORE_OUT:
                _put(_words(out) + t * N, i, word, lane, N, C)
            if NORM:
                even, odd = _open(word)
                square += even * even + odd * odd
        if NORM:
            rstd = gl.rsqrt(gl.sum(square, 0) / D + out_eps)
            weight = _vector(out_weight, lane, N, C)
            # the model's order: normalise, round, multiply
            for i in gl.static_range((N + C - 1) // C):
                even, odd = _open(mixed[i])
                even, odd = _open(_close(even * rstd, odd * rstd))
                word = _close(even * weight[2 * i], odd * weight[2 * i + 1])
                _put(_words(normed) + t * N, i, word, lane, N, C)
    async_copy.wait_group(0)


@gluon.jit
def mix_backward(
    sources, grads, query, norm_weight, d_out, stats, d_key, T,
    D: gl.constexpr, N: gl.constexpr, C: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """grads: S tensors like sources; d_key [programs, D] float32 partial d(query * norm_weight).

    A token's stream is its d_out row and its sources, all of which stay in the ring (SLOTS above S)
    from the dot products to the gradients.
    """
    S: gl.constexpr = len(sources)
    lanes: gl.constexpr = gl.BlockedLayout([C // (32 * W)], [32], [W], [0])
    ring = _ring(SLOTS, lanes, N, C)
    lane = gl.arange(0, C, lanes)
    key = _key(query, norm_weight, lane, N, C)
    stream = (d_out,) + sources
    grad_key = ()
    for _ in gl.static_range(2 * ((N + C - 1) // C)):
        grad_key = grad_key + (gl.zeros([C], gl.float32, lanes),)
    start = gl.program_id(0).to(gl.int64)
    step = gl.num_programs(0)
    for i in gl.static_range(SLOTS):
        _request(ring, i, stream, i, start, step, T, lane, N, C)
    slot = 0
    for t in range(start, T, step):
        row_stats = stats + t * (2 * S + 1)
        lse = gl.load(row_stats + 2 * S)
        scores = ()
        rstds = ()
        for s in gl.static_range(S):
            scores = scores + (gl.load(row_stats + s),)
            rstds = rstds + (gl.load(row_stats + S + s),)
        g = ()
        dots = ()
        for first in gl.static_range(0, S, GROUP):
            async_copy.wait_group(SLOTS - 1 - min(first + GROUP, S))
            if first == 0:
                for i in gl.static_range((N + C - 1) // C):
                    g = g + (ring[i].index(slot).load(lanes),)
            vectors = ()
            for j in gl.static_range(min(GROUP, S - first)):
                place = _wrap(slot + 1 + first + j, SLOTS)
                dot = gl.zeros([C], gl.float32, lanes)
                for i in gl.static_range((N + C - 1) // C):
                    even, odd = _open(ring[i].index(place).load(lanes))
                    g_even, g_odd = _open(g[i])
                    dot += even * g_even + odd * g_odd
                vectors = vectors + (dot,)
            dots = dots + _row_sums(vectors)
        mean = 0.0
        for s in gl.static_range(S):
            mean += gl.exp(scores[s] - lse) * dots[s]
        for s in gl.static_range(S + 1):
            place = _wrap(slot + s, SLOTS)
            if s > 0:
                p = gl.exp(scores[s - 1] - lse)
                d_score = p * (dots[s - 1] - mean) * rstds[s - 1]
                pull = -d_score * rstds[s - 1] * scores[s - 1] / D
                to = _words(grads[s - 1]) + t * N
                summed = ()
                for i in gl.static_range((N + C - 1) // C):
                    even, odd = _open(ring[i].index(place).load(lanes))
                    g_even, g_odd = _open(g[i])
                    summed = summed + (grad_key[2 * i] + d_score * even,)
                    summed = summed + (grad_key[2 * i + 1] + d_score * odd,)
                    even = p * g_even + d_score * key[2 * i] + pull * even
                    odd = p * g_odd + d_score * key[2 * i + 1] + pull * odd
                    _put(to, i, _close(even, odd), lane, N, C)
                grad_key = summed
            _request(ring, place, stream, s + SLOTS, t, step, T, lane, N, C)
        slot = _wrap(slot + S + 1, SLOTS)
    for i in gl.static_range((N + C - 1) // C):
        at = d_key + start * D + 2 * (i * C + lane)
        keep = lane < N - i * C
        gl.store(at, grad_key[2 * i], mask=keep)
        gl.store(at + 1, grad_key[2 * i + 1], mask=keep)
    async_copy.wait_group(0)
