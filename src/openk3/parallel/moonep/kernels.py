"""Triton kernels that move rows, values and experts between GPUs through peer pointers.

Tokens are pushed to where they are computed and their sums pulled from there; no step needs a size
on the host, and none needs multicast.

Legend: T tokens, k choices, P = T k pairs, R ranks, N rows, L width, B experts a rank owns.
"""

import triton
import triton.language as tl


@triton.jit
def _peer(peers, rank, like):
    """The buffer of `rank` as a pointer of `like`'s type; peers [R] int64 addresses."""
    return tl.load(peers + rank).to(tl.pointer_type(like.dtype.element_ty))


@triton.jit
def push_counts(load, peers, me, E: tl.constexpr, BLOCK: tl.constexpr):
    """Row `me` of every peer's counts [R, E]; one program a peer."""
    there = _peer(peers, tl.program_id(0), load) + me * E
    for start in tl.range(0, E, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(there + at, tl.load(load + at, mask=at < E), mask=at < E)


@triton.jit
def announce(
    rank, row, first, weights, first_rows, row_weights, peer_first, peer_weight, P,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """For every pair: the row its token arrives in, and its weight, into its rank's tables [N]."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    to = tl.load(rank + pair, mask=pair < P, other=-1)
    real = to >= 0
    at = tl.load(row + pair, mask=real, other=0)
    source = tl.load(row + tl.load(first + pair, mask=real, other=0), mask=real, other=0)
    there = tl.load(peer_first + to, mask=real, other=0)
    there = there.to(tl.pointer_type(first_rows.dtype.element_ty))
    tl.store(there + at, source.to(tl.int32), mask=real)
    there = tl.load(peer_weight + to, mask=real, other=0)
    there = there.to(tl.pointer_type(row_weights.dtype.element_ty))
    tl.store(there + at, tl.load(weights + pair, mask=real, other=0.0), mask=real)


@triton.jit
def push_tokens(
    x, rank, row, first, peers, L: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """x [T, L]: a token once into its row on each of its ranks; one program a pair."""
    pair = tl.program_id(0).to(tl.int64)
    to = tl.load(rank + pair)
    if (to >= 0) & (tl.load(first + pair) == pair):
        there = _peer(peers, to, x) + tl.load(row + pair) * L
        here = x + (pair // TOP_K) * L
        for start in tl.static_range(0, L, BLOCK):
            col = start + tl.arange(0, BLOCK)
            tl.store(there + col, tl.load(here + col, mask=col < L), mask=col < L)


@triton.jit
def spread_copies(
    rows, first_row, N, L: tl.constexpr, BR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """In place: copies of tokens that arrived once, and zeros in rows of nobody (first_row -1)."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    source = tl.load(first_row + row, mask=row < N, other=-1).to(tl.int64)
    change = (row < N) & (source != row)
    if tl.max(change.to(tl.int32), 0) > 0:
        for start in tl.static_range(0, L, BLOCK):
            col = start + tl.arange(0, BLOCK)[None, :]
            there = (source >= 0)[:, None] & (col < L)
            value = tl.load(rows + source[:, None] * L + col, mask=there, other=0.0)
            tl.store(rows + row[:, None] * L + col, value, mask=change[:, None] & (col < L))


@triton.jit
def add_rows(rows, order, starts, out, L: tl.constexpr, BLOCK: tl.constexpr, ZERO: tl.constexpr):
    """out [m, L]: each target's rows added in float32 in their order; one program a target.

    ZERO: targets without rows become zero instead of staying as they are.
    """
    target = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(starts + target)
    end = tl.load(starts + target + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(begin, end):
        row = tl.load(order + i)
        total += tl.load(rows + row * L + col, mask=col < L, other=0.0).to(tl.float32)
    keep = col < L
    if not ZERO:
        keep = keep & (end > begin)
    tl.store(out + target * L + col, total, mask=keep)


@triton.jit
def pull_tokens(
    out, rank, row, first, peers, L: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out [T, L]: the sums of each token's rows, of all its ranks, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        of = tl.load(rank + pair)
        travels = (of >= 0) & (tl.load(first + pair) == pair)
        there = _peer(peers, tl.maximum(of, 0), out) + tl.load(row + pair) * L
        total += tl.load(there + col, mask=(col < L) & travels, other=0.0).to(tl.float32)
    tl.store(out + token * L + col, total, mask=col < L)


@triton.jit
def pull_values(out, rank, row, peers, P, BLOCK: tl.constexpr):
    """out [P]: the value of each pair's row; 0 for padding."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    of = tl.load(rank + pair, mask=pair < P, other=-1)
    real = of >= 0
    there = tl.load(peers + of, mask=real, other=0).to(tl.pointer_type(out.dtype.element_ty))
    at = tl.load(row + pair, mask=real, other=0)
    tl.store(out + pair, tl.load(there + at, mask=real, other=0.0), mask=pair < P)


@triton.jit
def push_experts(
    own, peers, redundant, me, B: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """own [B, SIZE]: what others have as redundant experts into their slots [B, SIZE].

    redundant [R, B]; one program a slot and block of BLOCK values.
    """
    slot = tl.program_id(0)
    expert = tl.load(redundant + slot)
    if (expert >= 0) & (expert // B == me):
        there = _peer(peers, slot // B, own) + (slot % B).to(tl.int64) * SIZE
        at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(own + (expert % B) * SIZE + at, mask=at < SIZE)
        tl.store(there + at, value, mask=at < SIZE)


@triton.jit
def pull_grads(
    own, peers, slots, B: tl.constexpr, R: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """own [B, SIZE] float32 += what is staged for it on other ranks, rank by rank.

    slots [R, B]: where rank d has staged own expert e, or -1.
    """
    expert = tl.program_id(0)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = own + expert.to(tl.int64) * SIZE + at
    total = tl.load(here, mask=at < SIZE, other=0.0)
    for rank in tl.range(0, R):
        slot = tl.load(slots + rank * B + expert)
        if slot >= 0:
            there = _peer(peers, rank, own) + slot * SIZE
            total += tl.load(there + at, mask=at < SIZE, other=0.0)
    tl.store(here, total, mask=at < SIZE)
