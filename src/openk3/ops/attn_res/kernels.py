"""Triton kernels of Block AttnRes: one program walks tokens, one row of D channels at a time.

Letters: T tokens, D channels, S sources. A row is held in registers as a few [n, C] pieces whose n
are the binary digits of D / C (7168 = (4 + 2 + 1) x 1024), so that no lane works on padding.
Sources stay separate tensors; everything between a load and a store is float32.

The backward pass keeps no output: the softmax gradient needs delta = <d_out, out>, and taking it
from a rounded `out` would put an error of that size into every gradient. It reads all sources of a
token, sums delta exactly, and only then writes their gradients.
"""

import triton
import triton.language as tl

from openk3.ops.row_kernels import (
    axpy,
    dot_part,
    load_row,
    repack,
    row_sums,
    scaled,
    store_row,
    zeros_row,
)


@triton.jit
def _load_key(
    query, norm_weight, D: tl.constexpr, PIECES: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr
):
    """The only way query and key-norm weight enter: their product, float32."""
    zero = tl.program_id(0) * 0
    q = load_row(query, zero, D, PIECES, C, VEC, "evict_last")
    w = load_row(norm_weight, zero, D, PIECES, C, VEC, "evict_last")
    out = ()
    for i in tl.static_range(len(PIECES)):
        out = out + (q[i].to(tl.float32) * w[i].to(tl.float32),)
    return out


@triton.jit
def _fill(
    queue, sources, first, upto: tl.constexpr, t, t_next,
    D: tl.constexpr, PIECES: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Load until the queue holds sources first..upto-1; those past S are the next token's."""
    S: tl.constexpr = len(sources)
    for s in tl.static_range(first + len(queue), upto):
        if s < S:
            queue = queue + (load_row(sources[s], t, D, PIECES, C, VEC, "evict_first"),)
        else:
            queue = queue + (load_row(sources[s - S], t_next, D, PIECES, C, VEC, "evict_first"),)
    return queue


@triton.jit
def _scores(rows, key, eps, D: tl.constexpr):
    """(score, 1/rms) of each row, interleaved in one tuple of scalars."""
    parts = ()
    for i in tl.static_range(len(rows)):
        parts = parts + (dot_part(rows[i], rows[i]), dot_part(rows[i], key))
    sums = row_sums(parts)
    out = ()
    for i in tl.static_range(len(rows)):
        rstd = tl.rsqrt(sums[2 * i] / D + eps)
        out = out + (sums[2 * i + 1] * rstd, rstd)
    return out


@triton.jit
def _store_normed(
    mixed, weight, normed, t, eps, dtype: tl.constexpr,
    D: tl.constexpr, PIECES: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """RMSNorm of the row as a reader of the stored `out` would compute it, rounding included."""
    w = load_row(weight, t * 0, D, PIECES, C, VEC, "evict_last")
    rounded = ()
    for i in tl.static_range(len(PIECES)):
        rounded = rounded + (mixed[i].to(dtype).to(tl.float32),)
    rstd = tl.rsqrt(row_sums((dot_part(rounded, rounded),))[0] / D + eps)
    weighted = ()
    for i in tl.static_range(len(PIECES)):
        unit = (rounded[i] * rstd).to(dtype).to(tl.float32)
        weighted = weighted + (unit * w[i].to(tl.float32),)
    store_row(normed, t, weighted, D, PIECES, C, VEC)


@triton.jit
def mix_forward(
    sources, query, norm_weight, out, normed, out_weight, stats, T, zero, eps, out_eps,
    D: tl.constexpr, PIECES: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr,
    GROUP: tl.constexpr, AHEAD: tl.constexpr, OPAQUE: tl.constexpr,
    STORE_OUT: tl.constexpr, STORE_STATS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """out [T, D]; stats [T, 2 S + 1] float32 = S scores, S reciprocal norms, log-sum-exp."""
    S: tl.constexpr = len(sources)
    zero = zero.to(tl.int16)
    key = _load_key(query, norm_weight, D, PIECES, C, VEC)
    start = tl.program_id(0).to(tl.int64)
    queue = _fill((), sources, 0, AHEAD, start, start, D, PIECES, C, VEC)
    for t in tl.range(start, T, tl.num_programs(0)):
        t_next = tl.minimum(t + tl.num_programs(0), T - 1)
        peak = -float("inf")
        total = 0.0
        acc = zeros_row(PIECES, C)
        for first in tl.static_range(0, S, GROUP):
            queue = _fill(
                queue, sources, first, min(first + GROUP, S) + AHEAD, t, t_next, D, PIECES, C, VEC
            )
            rows = queue[: min(GROUP, S - first)]
            queue = queue[min(GROUP, S - first) :]
            scores = _scores(rows, key, eps, D)
            top = peak
            for i in tl.static_range(len(rows)):
                top = tl.maximum(top, scores[2 * i])
            decay = tl.exp(peak - top)
            peak = top
            total = total * decay
            acc = scaled(acc, decay)
            for i in tl.static_range(len(rows)):
                p = tl.exp(scores[2 * i] - top)
                total += p
                acc = axpy(acc, repack(rows[i], zero, OPAQUE), p)
                if STORE_STATS:
                    tl.store(stats + t * (2 * S + 1) + first + i, scores[2 * i])
                    tl.store(stats + t * (2 * S + 1) + S + first + i, scores[2 * i + 1])
        mixed = scaled(acc, 1.0 / total)
        if STORE_STATS:
            tl.store(stats + t * (2 * S + 1) + 2 * S, peak + tl.log(total))
        if STORE_OUT:
            store_row(out, t, mixed, D, PIECES, C, VEC)
        if NORM:
            dtype: tl.constexpr = sources[0].dtype.element_ty
            _store_normed(mixed, out_weight, normed, t, out_eps, dtype, D, PIECES, C, VEC)


@triton.jit
def _load_rows(
    sources, upto: tl.constexpr, t,
    D: tl.constexpr, PIECES: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    rows = ()
    for s in tl.static_range(upto):
        rows = rows + (load_row(sources[s], t, D, PIECES, C, VEC, "evict_first"),)
    return rows


@triton.jit
def _dots(rows, g, zero, OPAQUE: tl.constexpr):
    """<row, g> of every row, at most three to a barrier."""
    dots = ()
    for first in tl.static_range(0, len(rows), 3):
        parts = ()
        for i in tl.static_range(first, min(first + 3, len(rows))):
            parts = parts + (dot_part(rows[i], repack(g, zero, OPAQUE)),)
        dots = dots + row_sums(parts)
    return dots


@triton.jit
def mix_backward(
    sources, grads, query, norm_weight, d_out, stats, d_key, T, zero,
    D: tl.constexpr, PIECES: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr,
    RESIDENT: tl.constexpr, OPAQUE: tl.constexpr,
):  # fmt: skip
    """grads: S tensors like sources; d_key [programs, D] float32 partial d(query * norm_weight).

    The first RESIDENT rows of a token stay in registers between its two phases (dot products, then
    gradients); as each is used up, the next token's row is requested in its place. The others are
    read again, from the L2 cache.
    """
    S: tl.constexpr = len(sources)
    zero = zero.to(tl.int16)
    key = _load_key(query, norm_weight, D, PIECES, C, VEC)
    grad_key = zeros_row(PIECES, C)
    start = tl.program_id(0).to(tl.int64)
    rows = _load_rows(sources, RESIDENT, start, D, PIECES, C, VEC)
    g_next = load_row(d_out, start, D, PIECES, C, VEC, "evict_first")
    for t in tl.range(start, T, tl.num_programs(0)):
        t_next = tl.minimum(t + tl.num_programs(0), T - 1)
        row_stats = stats + t * (2 * S + 1)
        lse = tl.load(row_stats + 2 * S)
        g = g_next
        dots = _dots(rows, g, zero, OPAQUE)
        for s in tl.static_range(RESIDENT, S):
            row = load_row(sources[s], t, D, PIECES, C, VEC, "evict_last")
            dots = dots + _dots((row,), g, zero, OPAQUE)
        g_next = load_row(d_out, t_next, D, PIECES, C, VEC, "evict_first")
        mean = 0.0
        for s in tl.static_range(S):
            mean += tl.exp(tl.load(row_stats + s) - lse) * dots[s]
        next_rows = ()
        for s in tl.static_range(S):
            score = tl.load(row_stats + s)
            rstd = tl.load(row_stats + S + s)
            p = tl.exp(score - lse)
            d_score = p * (dots[s] - mean) * rstd
            if s < RESIDENT:
                row = repack(rows[s], zero, OPAQUE)
            else:
                row = load_row(sources[s], t, D, PIECES, C, VEC, "evict_first")
            grad = axpy(scaled(repack(g, zero, OPAQUE), p), key, d_score)
            grad = axpy(grad, row, -d_score * rstd * score / D)
            store_row(grads[s], t, grad, D, PIECES, C, VEC)
            grad_key = axpy(grad_key, row, d_score)
            if s < RESIDENT:
                next_rows = next_rows + (
                    load_row(sources[s], t_next, D, PIECES, C, VEC, "evict_first"),
                )
        rows = next_rows
    store_row(d_key, start, grad_key, D, PIECES, C, VEC)


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
