"""Triton kernels of Block AttnRes: one program walks tokens, one row of D channels at a time.

Letters: T tokens, D channels, S sources. Sources stay separate tensors; everything between a load
and a store is float32.

The backward pass keeps no output: the softmax gradient needs delta = <d_out, out>, and taking it
from a rounded `out` would put an error of that size into every gradient. It reads all sources of a
token, sums delta exactly, and only then writes their gradients.
"""

import triton
import triton.language as tl

from openk3.ops.row_kernels import (
    axpy,
    close,
    dot_part,
    load_row,
    load_vector,
    parts,
    row_sums,
    scaled,
    store_row,
    store_vector,
    times,
    zeros_like,
)


@triton.jit
def _load_key(
    query, norm_weight, PACKED: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """The only way query and key-norm weight enter: their product, float32."""
    q = load_vector(query, PACKED, N, C, VEC)
    return times(q, load_vector(norm_weight, PACKED, N, C, VEC))


@triton.jit
def _fill(
    queue, sources, first, upto: tl.constexpr, t, t_next,
    PACKED: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    VEC: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Load until the queue holds sources first..upto-1; those past S are the next token's."""
    S: tl.constexpr = len(sources)
    for s in tl.static_range(first + len(queue), upto):
        if s < S:
            row = load_row(sources[s], t, PACKED, N, C, VEC, EVICT)
        else:
            row = load_row(sources[s - S], t_next, PACKED, N, C, VEC, EVICT)
        queue = queue + (row,)
    return queue


@triton.jit
def _scores(rows, key, eps, D: tl.constexpr, PACKED: tl.constexpr):
    """(score, 1/rms) of each row, interleaved in one tuple of scalars."""
    vectors = ()
    for i in tl.static_range(len(rows)):
        x = parts(rows[i], PACKED)
        vectors = vectors + (dot_part(x, x), dot_part(x, key))
    sums = row_sums(vectors)
    out = ()
    for i in tl.static_range(len(rows)):
        rstd = tl.rsqrt(sums[2 * i] / D + eps)
        out = out + (sums[2 * i + 1] * rstd, rstd)
    return out


@triton.jit
def _norm(
    row, weight, eps, D: tl.constexpr, dtype: tl.constexpr, PACKED: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Raw RMSNorm of a raw row, with the model's order of casts: normalise, round, multiply."""
    x = parts(row, PACKED)
    rstd = tl.rsqrt(row_sums((dot_part(x, x),))[0] / D + eps)
    unit = parts(close(scaled(x, rstd), dtype, PACKED, ASM), PACKED)
    w = load_vector(weight, PACKED, N, C, VEC)
    return close(times(unit, w), dtype, PACKED, ASM)


@triton.jit(do_not_specialize=["T"])
def mix_forward(
    sources, query, norm_weight, out, normed, out_weight, stats, T, eps, out_eps,
    D: tl.constexpr, PACKED: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    VEC: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr, ASM: tl.constexpr,
    STORE_OUT: tl.constexpr, STORE_STATS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """out [T, D]; stats [T, 2 S + 1] float32 = S scores, S reciprocal norms, log-sum-exp.

    GROUP rows share a barrier; AHEAD more are requested before they are worked on.
    """
    S: tl.constexpr = len(sources)
    dtype: tl.constexpr = sources[0].dtype.element_ty
    key = _load_key(query, norm_weight, PACKED, N, C, VEC)
    start = tl.program_id(0).to(tl.int64)
    queue = _fill((), sources, 0, AHEAD, start, start, PACKED, N, C, VEC, "evict_first")
    for t in tl.range(start, T, tl.num_programs(0)):
        t_next = tl.minimum(t + tl.num_programs(0), T - 1)
        peak = -float("inf")
        total = 0.0
        acc = zeros_like(key)
        for first in tl.static_range(0, S, GROUP):
            queue = _fill(
                queue, sources, first, min(first + GROUP, S) + AHEAD, t, t_next,
                PACKED, N, C, VEC, "evict_first",
            )  # fmt: skip
            rows = queue[: min(GROUP, S - first)]
            queue = queue[min(GROUP, S - first) :]
            scores = _scores(rows, key, eps, D, PACKED)
            top = peak
            for i in tl.static_range(len(rows)):
                top = tl.maximum(top, scores[2 * i])
            if first > 0:
                decay = tl.exp(peak - top)
                total = total * decay
                acc = scaled(acc, decay)
            peak = top
            for i in tl.static_range(len(rows)):
                p = tl.exp(scores[2 * i] - top)
                total += p
                acc = axpy(acc, parts(rows[i], PACKED), p)
                if STORE_STATS:
                    tl.store(stats + t * (2 * S + 1) + first + i, scores[2 * i])
                    tl.store(stats + t * (2 * S + 1) + S + first + i, scores[2 * i + 1])
        mixed = close(scaled(acc, 1.0 / total), dtype, PACKED, ASM)
        if STORE_STATS:
            tl.store(stats + t * (2 * S + 1) + 2 * S, peak + tl.log(total))
        if STORE_OUT:
            store_row(out, t, mixed, PACKED, N, C, VEC)
        if NORM:
            y = _norm(mixed, out_weight, out_eps, D, dtype, PACKED, N, C, VEC, ASM)
            store_row(normed, t, y, PACKED, N, C, VEC)


@triton.jit
def _dots(rows, g, PACKED: tl.constexpr):
    """<row, g> of at most three rows, one barrier; g opened."""
    vectors = ()
    for i in tl.static_range(len(rows)):
        vectors = vectors + (dot_part(parts(rows[i], PACKED), g),)
    return row_sums(vectors)


@triton.jit(do_not_specialize=["T"])
def mix_backward(
    sources, grads, query, norm_weight, d_out, stats, d_key, T,
    D: tl.constexpr, PACKED: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    VEC: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr, RESIDENT: tl.constexpr,
    ASM: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """grads: S tensors like sources; d_key [programs, D] float32 partial d(query * norm_weight).

    Two phases a token: dot products of all rows, then gradients. The first RESIDENT rows stay in
    registers in between, the others are read again from the nearest cache; GROUP rows share a
    barrier and AHEAD rows, of the next token at the end, are requested before they are needed.
    """
    S: tl.constexpr = len(sources)
    dtype: tl.constexpr = sources[0].dtype.element_ty
    key = _load_key(query, norm_weight, PACKED, N, C, VEC)
    grad_key = zeros_like(key)
    start = tl.program_id(0).to(tl.int64)
    queue = _fill((), sources, 0, AHEAD, start, start, PACKED, N, C, VEC, EVICT)
    g_next = load_row(d_out, start, PACKED, N, C, VEC, "evict_first")
    for t in tl.range(start, T, tl.num_programs(0)):
        t_next = tl.minimum(t + tl.num_programs(0), T - 1)
        row_stats = stats + t * (2 * S + 1)
        lse = tl.load(row_stats + 2 * S)
        g = parts(g_next, PACKED)
        kept = ()
        dots = ()
        for first in tl.static_range(0, S, GROUP):
            queue = _fill(
                queue, sources, first, min(first + GROUP, S) + AHEAD, t, t_next,
                PACKED, N, C, VEC, EVICT,
            )  # fmt: skip
            kept = kept + queue[: max(0, min(RESIDENT - first, GROUP, S - first))]
            dots = dots + _dots(queue[: min(GROUP, S - first)], g, PACKED)
            queue = queue[min(GROUP, S - first) :]
        g_next = load_row(d_out, t_next, PACKED, N, C, VEC, "evict_first")
        mean = 0.0
        for s in tl.static_range(S):
            mean += tl.exp(tl.load(row_stats + s) - lse) * dots[s]
        for s in tl.static_range(S):
            score = tl.load(row_stats + s)
            rstd = tl.load(row_stats + S + s)
            p = tl.exp(score - lse)
            d_score = p * (dots[s] - mean) * rstd
            if s < RESIDENT:
                x = parts(kept[s], PACKED)
            else:
                row = load_row(sources[s], t, PACKED, N, C, VEC, "evict_first")
                x = parts(row, PACKED)
            grad_key = axpy(grad_key, x, d_score)
            grad = axpy(scaled(g, p), key, d_score)
            grad = axpy(grad, x, -d_score * rstd * score / D)
            raw = close(grad, dtype, PACKED, ASM)
            store_row(grads[s], t, raw, PACKED, N, C, VEC)
    store_vector(d_key + start * D, grad_key, PACKED, N, C, VEC)


@triton.jit
def reduce_key(
    d_key, query, norm_weight, d_query, d_norm_weight, num_parts,
    D: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Sum the partial key gradients in a fixed order and split them by the product rule."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < D
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, num_parts, PARTS):
        rows = first + tl.arange(0, PARTS)
        mask = (rows < num_parts)[:, None] & keep[None, :]
        total += tl.sum(tl.load(d_key + rows[:, None] * D + cols[None, :], mask=mask, other=0.0), 0)
    q = tl.load(query + cols, mask=keep, other=0.0).to(tl.float32)
    w = tl.load(norm_weight + cols, mask=keep, other=0.0).to(tl.float32)
    tl.store(d_query + cols, total * w, mask=keep)
    tl.store(d_norm_weight + cols, total * q, mask=keep)
