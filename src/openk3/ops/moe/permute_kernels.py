"""Triton kernels that sort (token, choice) pairs by expert, move their rows, and plan tiles.

Everything the host needs is a static bound; counts stay on the device. The order is stable: an
expert's rows keep the order of their pairs, so ties and recomputation cannot change a result.

Legend: T tokens, k choices a token, P = T k pairs, E experts, R rows, B pairs a block.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["P"])
def count_blocks(
    ids, counts, before, P, B: tl.constexpr, E_PAD: tl.constexpr
):  # fmt: skip
    """Per block of B pairs: counts [blocks, E_PAD] and their exclusive sum over experts."""
    block = tl.program_id(0)
    index = block * B + tl.arange(0, B)
    flat = tl.load(ids + index, mask=index < P, other=0).to(tl.int32)
    count = tl.histogram(flat, E_PAD, mask=index < P)
    row = block * E_PAD + tl.arange(0, E_PAD)
    tl.store(counts + row, count)
    tl.store(before + row, tl.cumsum(count, 0) - count)


@triton.jit(do_not_specialize=["num_blocks"])
def sum_blocks(counts, totals, num_blocks, E_PAD: tl.constexpr, W: tl.constexpr, NB: tl.constexpr):
    """In place: each block's count becomes the sum of the blocks before it; totals [E_PAD]."""
    expert = tl.program_id(0) * W + tl.arange(0, W)
    carry = tl.zeros([W], tl.int32)
    for first in tl.range(0, num_blocks, NB):
        block = first + tl.arange(0, NB)
        offs = block[:, None] * E_PAD + expert[None, :]
        mask = (block < num_blocks)[:, None]
        count = tl.load(counts + offs, mask=mask, other=0)
        tl.store(counts + offs, carry[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        carry += tl.sum(count, 0)
    tl.store(totals + expert, carry)


@triton.jit
def _split(units, SPLITS: tl.constexpr):
    """Units of 64 rows -> (tiles of the greatest height, how the rest is split).

    SPLITS[r], for rests r below twice the greatest height, holds the number of tiles of height h
    in its digit h of base 8.
    """
    TALL: tl.constexpr = len(SPLITS) // 2
    tall = units // TALL - (units >= TALL).to(tl.int32)
    rest = units - tall * TALL
    split = rest * 0
    for r in tl.static_range(1, len(SPLITS)):
        split += (rest == r).to(tl.int32) * SPLITS[r]
    return tall, split


@triton.jit
def plan_experts(
    totals, starts, ends, order, first_tile, num_tiles,
    E: tl.constexpr, E_PAD: tl.constexpr, ALIGN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program: where each expert's rows lie and how many tiles cover them.

    starts, ends [E]; order [E] experts by falling count; first_tile [E] an expert's first entry in
    the tile tables, largest experts first; num_tiles [1].
    """
    expert = tl.arange(0, E_PAD)
    valid = expert < E
    count = tl.where(valid, tl.load(totals + expert), 0)
    padded = (count + ALIGN - 1) // ALIGN * ALIGN
    end = tl.cumsum(padded, 0)
    tl.store(starts + expert, end - padded, mask=valid)
    tl.store(ends + expert, end, mask=valid)
    key = tl.where(valid, count + 1, 0).to(tl.int64) * E_PAD + (E_PAD - 1 - expert)
    key = tl.sort(key, descending=True)
    sorted_count = (key // E_PAD - 1).to(tl.int32)
    sorted_expert = E_PAD - 1 - (key % E_PAD).to(tl.int32)
    keep = sorted_count >= 0
    tiles, split = _split(tl.where(keep, (sorted_count + 63) // 64, 0), SPLITS)
    for h in tl.static_range(1, len(SPLITS) // 2 + 1):
        tiles += (split >> (3 * h)) & 7
    tl.store(order + expert, sorted_expert, mask=keep)
    tl.store(first_tile + sorted_expert, tl.cumsum(tiles, 0) - tiles, mask=keep)
    tl.store(num_tiles, tl.sum(tiles, 0))


@triton.jit
def list_tiles(
    totals, starts, ends, first_tile, tile_expert, tile_row, tile_group, row_pair,
    ALIGN: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Fill one expert's entries of the tile tables and mark its padding rows with pair -1."""
    TALL: tl.constexpr = len(SPLITS) // 2
    expert = tl.program_id(0)
    start = tl.load(starts + expert)
    count = tl.load(totals + expert)
    origin = tl.load(first_tile + expert)
    tall, split = _split((count + 63) // 64, SPLITS)
    for first in tl.range(0, tall, W):
        i = first + tl.arange(0, W)
        tl.store(tile_row + origin + i, start + i * 64 * TALL + TALL, mask=i < tall)
    tiles = tall
    row = start + tall * 64 * TALL
    for down in tl.static_range(TALL):
        few = tl.arange(0, 8)
        number = (split >> (3 * (TALL - down))) & 7
        code = row + few * 64 * (TALL - down) + TALL - down
        tl.store(tile_row + origin + tiles + few, code, mask=few < number)
        tiles += number
        row += number * 64 * (TALL - down)
    groups = (tiles + GROUP - 1) // GROUP
    size = (tiles + groups - 1) // (groups + (groups == 0).to(tl.int32))
    for first in tl.range(0, tiles, W):
        place = first + tl.arange(0, W)
        group = place // size * size
        sweep = (origin + group) * 64 + tl.minimum(size + 0 * place, tiles - group)
        tl.store(tile_expert + origin + place, 0 * place + expert, mask=place < tiles)
        tl.store(tile_group + origin + place, sweep, mask=place < tiles)
    if ALIGN > 1:
        pad = start + count + tl.arange(0, ALIGN)
        tl.store(row_pair + pad, tl.full([ALIGN], -1, tl.int32), mask=pad < tl.load(ends + expert))


@triton.jit(do_not_specialize=["P"])
def place_pairs(
    ids, counts, before, starts, row_of_pair, row_pair, P, B: tl.constexpr, E_PAD: tl.constexpr
):  # fmt: skip
    """row_of_pair [P] and its inverse row_pair [R], by a stable sort inside each block."""
    block = tl.program_id(0)
    i = tl.arange(0, B)
    index = block * B + i
    flat = tl.load(ids + index, mask=index < P, other=E_PAD).to(tl.int32)
    key = tl.sort(flat * B + i)
    expert = key // B
    pair = block * B + key % B
    keep = expert < E_PAD
    rank = i - tl.load(before + block * E_PAD + expert, mask=keep, other=0)
    row = tl.load(starts + expert, mask=keep, other=0) + rank
    row += tl.load(counts + block * E_PAD + expert, mask=keep, other=0)
    tl.store(row_of_pair + pair, row, mask=keep)
    tl.store(row_pair + row, pair, mask=keep)


@triton.jit
def gather_rows(
    x, weights, row_pair, out, row_weight, last_row, TOP_K: tl.constexpr, K: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """out [R, K] = x[row_pair // k], zeros on padding rows; with WEIGHTS also row_weight [R]."""
    num_rows = tl.load(last_row)
    for first in tl.range(tl.program_id(0) * BR, num_rows, tl.num_programs(0) * BR):
        row = (first + tl.arange(0, BR)).to(tl.int64)
        used = row < num_rows
        pair = tl.load(row_pair + row, mask=used, other=-1)
        source = tl.maximum(pair, 0).to(tl.int64)
        values = ()
        for start in tl.static_range(0, K, BC):  # all loads before the first store
            col = start + tl.arange(0, BC)[None, :]
            mask = (pair >= 0)[:, None] & (col < K)
            at = x + (source // TOP_K)[:, None] * K + col
            values = values + (tl.load(at, mask=mask, other=0.0),)
        for start in tl.static_range(0, K, BC):
            col = start + tl.arange(0, BC)[None, :]
            at = out + row[:, None] * K + col
            tl.store(at, values[start // BC], mask=used[:, None] & (col < K))
        if WEIGHTS:
            value = tl.load(weights + source, mask=pair >= 0, other=0.0)
            tl.store(row_weight + row, value, mask=used)


@triton.jit
def combine_rows(
    y, row_of_pair, weights, out, TOP_K: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """out [T, N] = sum_j (weights[t, j]) y[row of (t, j)], float32 in the order of j."""
    t = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = col < N
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(row_of_pair + t * TOP_K + j).to(tl.int64)
        value = tl.load(y + row * N + col, mask=keep, other=0.0).to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(weights + t * TOP_K + j)
        total += value
    tl.store(out + t * N + col, total, mask=keep)


@triton.jit
def pick_pairs(values, row_of_pair, out, P, B: tl.constexpr):
    """out [P] = values[row_of_pair]."""
    index = tl.program_id(0) * B + tl.arange(0, B)
    row = tl.load(row_of_pair + index, mask=index < P, other=0)
    tl.store(out + index, tl.load(values + row, mask=index < P, other=0.0), mask=index < P)
