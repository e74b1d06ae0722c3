"""Triton kernels of two-phase Block AttnRes.

First all queries of a block over its finished blocks, then one merge a query with the running sum.

Legend: T tokens, D channels, N finished blocks (sources), Q queries, P tokens a program.
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
    times,
)


@triton.jit
def _product(a, b, SPLIT: tl.constexpr):
    """a @ b with b exact and a float32: two bfloat16 terms of a, or IEEE float32 (slow)."""
    if SPLIT:
        high = a.to(tl.bfloat16)
        low = (a - high.to(tl.float32)).to(tl.bfloat16)
        out = tl.dot(low, b, out_dtype=tl.float32)
        out = tl.dot(high, b, out, out_dtype=tl.float32)
    else:
        out = tl.dot(a, b.to(tl.float32), input_precision="ieee", out_dtype=tl.float32)
    return out


@triton.jit(do_not_specialize=["T"])
def block_partials(
    sources, queries, norm_weights, out, lse, T, eps,
    D: tl.constexpr, Q: tl.constexpr, Q_PAD: tl.constexpr, P: tl.constexpr, BC: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """out [Q, T, D]: every query's mix of the sources alone; lse [Q, T] its scores' log-sum-exp.

    Sixteen rows a program, source s of token p in row 16 / P p + s, so that both sums over a
    token's rows are tensor-core products. The second reading of the rows comes from cache.
    """
    N: tl.constexpr = len(sources)
    SLOTS: tl.constexpr = 16 // P
    first = tl.program_id(0).to(tl.int64) * P
    row = tl.arange(0, 16)
    token = first + row // SLOTS
    used = (token < T) & (row % SLOTS < N)
    place = tl.zeros([16], tl.int64)
    size: tl.constexpr = sources[0].dtype.element_ty.primitive_bitwidth // 8
    for s in tl.static_range(1, N):
        apart = (sources[s].to(tl.int64) - sources[0].to(tl.int64)) // size
        place = tl.where(row % SLOTS == s, apart, place)
    at = sources[0] + tl.multiple_of(place + token * D, 8)[:, None]
    query = tl.arange(0, Q_PAD)
    scores = tl.zeros([Q_PAD, 16], tl.float32)
    squares = tl.zeros([16], tl.float32)
    for start in tl.range(0, D, BC):
        col = start + tl.arange(0, BC)
        v = tl.load(at + col[None, :], mask=used[:, None], other=0.0)
        squares += tl.sum(v.to(tl.float32) * v.to(tl.float32), 1)
        spot = query[:, None] * D + col[None, :]
        q = tl.load(queries + spot, mask=(query < Q)[:, None], other=0.0).to(tl.float32)
        w = tl.load(norm_weights + spot, mask=(query < Q)[:, None], other=0.0).to(tl.float32)
        scores += _product(q * w, tl.trans(v), SPLIT)
    scores = scores * tl.rsqrt(squares / D + eps)[None, :]
    scores = tl.where(used[None, :], scores, -float("inf"))
    by_token = tl.reshape(scores, (Q_PAD, P, SLOTS))
    peak = tl.maximum(tl.max(by_token, 2), -1e30)
    weight = tl.exp(by_token - peak[:, :, None])
    total = tl.maximum(tl.sum(weight, 2), 1e-30)
    weight = weight / total[:, :, None]
    tokens = first + tl.arange(0, P)
    spot = query[:, None] * T + tokens[None, :]
    tl.store(lse + spot, peak + tl.log(total), mask=(query < Q)[:, None] & (tokens < T)[None, :])
    own = tl.arange(0, P)[:, None] == tl.arange(0, P)[None, :]
    spread = tl.where(own[None, :, :, None], weight[:, :, None, :], 0.0)
    spread = tl.reshape(spread, (Q_PAD * P, 16))
    out_row = tl.arange(0, Q_PAD * P)
    out_token = first + out_row % P
    keep = (out_row // P < Q) & (out_token < T)
    to = out + ((out_row // P) * T + out_token)[:, None] * D
    for start in tl.range(0, D, BC):
        col = start + tl.arange(0, BC)
        v = tl.load(at + col[None, :], mask=used[:, None], other=0.0)
        mixed = _product(spread, v, SPLIT).to(out.dtype.element_ty)
        tl.store(to + col[None, :], mixed, mask=keep[:, None])


@triton.jit(do_not_specialize=["T"])
def merge_running(
    partial, lse, running, query, norm_weight, out_weight, out, T, eps, out_eps,
    D: tl.constexpr, PACKED: tl.constexpr, N: tl.constexpr, C: tl.constexpr, VEC: tl.constexpr,
    NORM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out [T, D]: a query's partial mix and the running sum joined by their scores, or its norm."""
    dtype: tl.constexpr = running.dtype.element_ty
    key = times(load_vector(query, PACKED, N, C, VEC), load_vector(norm_weight, PACKED, N, C, VEC))
    start = tl.program_id(0).to(tl.int64)
    for t in tl.range(start, T, tl.num_programs(0)):
        p = parts(load_row(running, t, PACKED, N, C, VEC, "evict_last"), PACKED)
        o = parts(load_row(partial, t, PACKED, N, C, VEC, "evict_first"), PACKED)
        sums = row_sums((dot_part(p, p), dot_part(p, key)))
        score = sums[1] * tl.rsqrt(sums[0] / D + eps)
        others = tl.load(lse + t)
        top = tl.maximum(score, others)
        mine = tl.exp(score - top)
        theirs = tl.exp(others - top)
        total = mine + theirs
        row = close(axpy(scaled(o, theirs / total), p, mine / total), dtype, PACKED, ASM)
        if NORM:
            x = parts(row, PACKED)
            rstd = tl.rsqrt(row_sums((dot_part(x, x),))[0] / D + out_eps)
            unit = parts(close(scaled(x, rstd), dtype, PACKED, ASM), PACKED)
            row = close(times(unit, load_vector(out_weight, PACKED, N, C, VEC)), dtype, PACKED, ASM)
        store_row(out, t, row, PACKED, N, C, VEC)
