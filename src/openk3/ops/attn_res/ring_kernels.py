"""Block AttnRes for Hopper GPUs and later: rows pass through a ring in shared memory (Gluon).

One program walks tokens. The rows of its stream (all sources of a token, then those of its next
token) are copied asynchronously into SLOTS places in shared memory; a place is asked for again as
soon as its row has been used. Loads therefore stay in flight through every barrier, and registers
hold sums only: what `kernels.py` does, with the waiting taken out.

Every thread copies the very words that it will read. Letters: T tokens, D channels, S sources,
N = D / 2 words of two channels a row, C words a piece, W warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from openk3.ops.attn_res.ring_row_kernels import (
    add_row,
    close_words,
    key_of,
    make_ring,
    open_words,
    put,
    request,
    row_sums,
    scaled,
    score_parts,
    vector_of,
    words,
    wrap,
)


@gluon.jit(do_not_specialize=["T"])
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
    ring = make_ring(SLOTS, lanes, N, C)
    lane = gl.arange(0, C, lanes)
    key = key_of(query, norm_weight, lane, N, C)
    zero = T >> 31
    start = gl.program_id(0).to(gl.int64)
    step = gl.num_programs(0)
    for i in gl.static_range(SLOTS):
        request(ring, i, sources, i, start, step, T, lane, N, C)
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
                vectors = vectors + score_parts(ring, wrap(slot + i, SLOTS), key, lanes, N, C)
            sums = row_sums(vectors)
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
                acc = scaled(acc, decay)
            peak = top
            gl.thread_barrier()  # or the compiler keeps the rows in registers instead
            for i in gl.static_range(min(GROUP, S - first)):
                p = gl.exp(scores[i] - top)
                total += p
                acc = add_row(acc, ring, wrap(slot + i, SLOTS), p, zero, lanes, N, C)
            for i in gl.static_range(min(GROUP, S - first)):
                place = wrap(slot + i, SLOTS)
                request(ring, place, sources, first + i + SLOTS, t, step, T, lane, N, C)
            slot = wrap(slot + min(GROUP, S - first), SLOTS)
        if STORE_STATS:
            gl.store(stats + t * (2 * S + 1) + 2 * S, peak + gl.log(total))
        scale = 1.0 / total
        mixed = ()
        square = gl.zeros([C], gl.float32, lanes)
        for i in gl.static_range((N + C - 1) // C):
            word = close_words(acc[2 * i] * scale, acc[2 * i + 1] * scale)
            mixed = mixed + (word,)
            if STORE_OUT:
                put(words(out) + t * N, i, word, lane, N, C)
            if NORM:
                even, odd = open_words(word)
                square += even * even + odd * odd
        if NORM:
            rstd = gl.rsqrt(gl.sum(square, 0) / D + out_eps)
            weight = vector_of(out_weight, lane, N, C)
            # the model's order: normalise, round, multiply
            for i in gl.static_range((N + C - 1) // C):
                even, odd = open_words(mixed[i])
                even, odd = open_words(close_words(even * rstd, odd * rstd))
                word = close_words(even * weight[2 * i], odd * weight[2 * i + 1])
                put(words(normed) + t * N, i, word, lane, N, C)
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["T"])
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
    ring = make_ring(SLOTS, lanes, N, C)
    lane = gl.arange(0, C, lanes)
    key = key_of(query, norm_weight, lane, N, C)
    stream = (d_out,) + sources
    grad_key = ()
    for _ in gl.static_range(2 * ((N + C - 1) // C)):
        grad_key = grad_key + (gl.zeros([C], gl.float32, lanes),)
    start = gl.program_id(0).to(gl.int64)
    step = gl.num_programs(0)
    for i in gl.static_range(SLOTS):
        request(ring, i, stream, i, start, step, T, lane, N, C)
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
                place = wrap(slot + 1 + first + j, SLOTS)
                dot = gl.zeros([C], gl.float32, lanes)
                for i in gl.static_range((N + C - 1) // C):
                    even, odd = open_words(ring[i].index(place).load(lanes))
                    g_even, g_odd = open_words(g[i])
                    dot += even * g_even + odd * g_odd
                vectors = vectors + (dot,)
            dots = dots + row_sums(vectors)
        mean = 0.0
        for s in gl.static_range(S):
            mean += gl.exp(scores[s] - lse) * dots[s]
        for s in gl.static_range(S + 1):
            place = wrap(slot + s, SLOTS)
            if s > 0:
                p = gl.exp(scores[s - 1] - lse)
                d_score = p * (dots[s - 1] - mean) * rstds[s - 1]
                pull = -d_score * rstds[s - 1] * scores[s - 1] / D
                to = words(grads[s - 1]) + t * N
                summed = ()
                for i in gl.static_range((N + C - 1) // C):
                    even, odd = open_words(ring[i].index(place).load(lanes))
                    g_even, g_odd = open_words(g[i])
                    summed = summed + (grad_key[2 * i] + d_score * even,)
                    summed = summed + (grad_key[2 * i + 1] + d_score * odd,)
                    even = p * g_even + d_score * key[2 * i] + pull * even
                    odd = p * g_odd + d_score * key[2 * i + 1] + pull * odd
                    put(to, i, close_words(even, odd), lane, N, C)
                grad_key = summed
            request(ring, place, stream, s + SLOTS, t, step, T, lane, N, C)
        slot = wrap(slot + S + 1, SLOTS)
    for i in gl.static_range((N + C - 1) // C):
        at = d_key + start * D + 2 * (i * C + lane)
        keep = lane < N - i * C
        gl.store(at, grad_key[2 * i], mask=keep)
        gl.store(at + 1, grad_key[2 * i + 1], mask=keep)
    async_copy.wait_group(0)
