"""Triton kernels that multiply a few tokens with 4-bit experts (K3 report §4).

Each chosen expert's bytes are streamed once.

A warp owns 16 n output rows of one expert and walks its input width 128 columns at a time. Weights
are the left operand of the tensor cores and arrive in registers exactly as the m16n8k16 fragments
want them (`mxfp4_layout.py`): 32 bytes a lane, no shared memory, 11 integer operations for 8
weights. A code's bits are laid into float16 so that it reads as value * 2^-14; that factor and the
block scale multiply the float32 partial sums, so every product is exact.

Legend: P (token, choice) pairs, E experts, N outputs, K inputs, B tokens a tile, M rows a tile.
"""

import triton
import triton.language as tl

from openk3.ops.moe.situ_kernels import situ


@triton.jit
def _unpack_plain(w, J: tl.constexpr):
    """The J-th of the four codes in each 16-bit word, as float16 bits (the interpreter's path)."""
    w = w.to(tl.int32)
    if J == 0:
        bits = w & 0x8E00
    elif J == 1:
        bits = (w << 3) & 0x8E00
    elif J == 2:
        bits = ((w << 6) & 0x0E00) | ((w << 1) & 0x8000)
    else:
        bits = ((w << 9) & 0x0E00) | ((w << 2) & 0x8000)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _unpack(w, ASM: tl.constexpr):
    """int16 words of four codes -> four float16 tensors of the same shape."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u;
            and.b32 $0, $4, 0x8E008E00;
            shl.b32 t, $4, 3;
            and.b32 $1, t, 0x8E008E00;
            shl.b32 t, $4, 6;
            and.b32 t, t, 0x0E000E00;
            shl.b32 u, $4, 1;
            lop3.b32 $2, u, 0x80008000, t, 0xEA;
            shl.b32 t, $4, 9;
            and.b32 t, t, 0x0E000E00;
            shl.b32 u, $4, 2;
            lop3.b32 $3, u, 0x80008000, t, 0xEA;
            }""",
            "=r,=r,=r,=r,r",
            [w],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        a = _unpack_plain(w, 0)
        b = _unpack_plain(w, 1)
        c = _unpack_plain(w, 2)
        d = _unpack_plain(w, 3)
    return a, b, c, d


@triton.jit
def _weight_tile(ptr, tiles, kb, KB: tl.constexpr, M: tl.constexpr):
    """int16 words [M, 32] of columns 128 kb .. 128 kb + 127, each lane's 16 bytes contiguous."""
    offs = (tiles[:, None] * KB + kb) * 512 + tl.arange(0, 512)[None, :]
    words = tl.load(ptr + offs, eviction_policy="evict_first")
    words = tl.reshape(words, (M // 16, 2, 8, 4, 2, 2, 2))  # tile, kt, g, t, r1, r0, h
    words = tl.permute(words, (0, 5, 2, 1, 4, 3, 6))  # tile, r0, g | kt, r1, t, h
    return tl.reshape(words, (M, 32))


@triton.jit
def _token_tile(ptr, rows, mask, column, K: tl.constexpr, B: tl.constexpr):
    """float16 [32, B]: columns column .. column + 31 of B rows, in the order of the words."""
    offs = rows[:, None] * K + column + tl.arange(0, 32)[None, :]
    x = tl.load(ptr + offs, mask=mask[:, None], other=0.0)
    x = tl.reshape(x, (B, 4, 2, 2, 2))  # n, t, kt, r1, h
    x = tl.permute(x, (2, 3, 1, 4, 0))  # kt, r1, t, h, n
    return tl.reshape(x, (32, B))


@triton.jit
def _scale_of(packed, J: tl.constexpr):
    """2^(code - 113) of byte J: the block scale times the 2^14 that `_unpack` left out."""
    code = (packed >> (8 * J)) & 0xFF
    bits = tl.minimum(code + 14, 254) << 23
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _accumulate(
    acc, w_ptr, s_ptr, tiles, scale_rows, kb, x, KB: tl.constexpr, M: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    a = _unpack(_weight_tile(w_ptr, tiles, kb, KB, M), ASM)
    packed = tl.load(s_ptr + scale_rows * KB + kb)
    for j in tl.static_range(4):
        part = tl.dot(a[j], x[j], out_dtype=tl.float32)
        acc += part * _scale_of(packed, j)[:, None]
    return acc


@triton.jit
def _token_tiles(ptr, rows, mask, kb, K: tl.constexpr, B: tl.constexpr):
    x = ()
    for j in tl.static_range(4):
        x = x + (_token_tile(ptr, rows, mask, kb * 128 + 32 * j, K, B),)
    return x


@triton.jit
def _round_mxfp8(x):
    """Each column of x [32, B] to MXFP8 values (E4M3, scale rule `rceil`), still float32."""
    amax = tl.max(tl.abs(x), 0)
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0) - 8
    exponent = tl.maximum(exponent, 1)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    v = x * inverse[None, :]
    # E4M3 by hand: three mantissa bits down to 2^-6, steps of 2^-9 below; 1.5 * 2^23 rounds to even
    binade = tl.maximum((v.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)
    step = ((binade - 3) << 23).to(tl.float32, bitcast=True)
    per_step = ((257 - binade) << 23).to(tl.float32, bitcast=True)
    return ((v * per_step + 12582912.0) - 12582912.0) * step * scale[None, :]


@triton.jit
def mxfp4_gate_up(
    x, x_scale, w1, s1, w3, s3, act, active, starts, pairs, beta1, beta2, top_k,
    K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, B: tl.constexpr, CAP: tl.constexpr,
    FP8: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """act [P, N] float16 = SiTU(w1 x, w3 x) of every pair; one program: M rows of one expert.

    x [T, K] float16 with x_scale [T] its powers of two; w1, w3 int16 words, s1, s3 [E, N, K / 128]
    four scale bytes each. active [slots] experts, starts [slots + 1] into pairs [P] (t top_k + j),
    both of which end early: an unused slot has starts equal.
    """
    KB: tl.constexpr = K // 128
    slot = tl.program_id(1)
    first = tl.load(starts + slot)
    last = tl.load(starts + slot + 1)
    expert = tl.load(active + slot).to(tl.int64)
    row0 = tl.program_id(0) * M
    tiles = expert * (N // 16) + row0 // 16 + tl.arange(0, M // 16)
    scale_rows = expert * N + row0 + tl.arange(0, M)
    for chunk in tl.range(first, last, B):
        index = chunk + tl.arange(0, B)
        mask = index < last
        pair = tl.load(pairs + index, mask=mask, other=0)
        token = pair // top_k
        gate = tl.zeros([M, B], tl.float32)
        up = tl.zeros([M, B], tl.float32)
        for kb in tl.range(0, KB):
            xs = _token_tiles(x, token, mask, kb, K, B)
            gate = _accumulate(gate, w1, s1, tiles, scale_rows, kb, xs, KB, M, ASM)
            up = _accumulate(up, w3, s3, tiles, scale_rows, kb, xs, KB, M, ASM)
        scale = tl.load(x_scale + token, mask=mask, other=0.0)[None, :]
        out = situ(gate * scale, up * scale, beta1, beta2, CAP, False, ASM)
        if FP8:
            out = _round_mxfp8(out)
        offs = pair[None, :].to(tl.int64) * N + row0 + tl.arange(0, M)[:, None]
        tl.store(act + offs, out.to(tl.float16), mask=mask[None, :])


@triton.jit
def mxfp4_down(
    act, w2, s2, out, active, starts, pairs,
    K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, B: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out [P, N] float32 = w2 act; grid and tables as in `mxfp4_gate_up`."""
    KB: tl.constexpr = K // 128
    slot = tl.program_id(1)
    first = tl.load(starts + slot)
    last = tl.load(starts + slot + 1)
    expert = tl.load(active + slot).to(tl.int64)
    row0 = tl.program_id(0) * M
    tiles = expert * (N // 16) + row0 // 16 + tl.arange(0, M // 16)
    scale_rows = expert * N + row0 + tl.arange(0, M)
    for chunk in tl.range(first, last, B):
        index = chunk + tl.arange(0, B)
        mask = index < last
        pair = tl.load(pairs + index, mask=mask, other=0)
        acc = tl.zeros([M, B], tl.float32)
        for kb in tl.range(0, KB):
            xs = _token_tiles(act, pair, mask, kb, K, B)
            acc = _accumulate(acc, w2, s2, tiles, scale_rows, kb, xs, KB, M, ASM)
        offs = pair[None, :].to(tl.int64) * N + row0 + tl.arange(0, M)[:, None]
        tl.store(out + offs, acc, mask=mask[None, :])


@triton.jit
def dequantise(
    words, scales, out,
    K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out [E, N, K] = the weights; one program: M rows of one expert."""
    KB: tl.constexpr = K // 128
    expert = tl.program_id(1).to(tl.int64)
    row0 = tl.program_id(0) * M
    tiles = expert * (N // 16) + row0 // 16 + tl.arange(0, M // 16)
    rows = expert * N + row0 + tl.arange(0, M)
    c = tl.arange(0, 32)  # kt, r1, t, h
    column = 8 * ((c >> 1) & 3) + 4 * (c >> 4) + 2 * ((c >> 3) & 1) + (c & 1)
    for kb in tl.range(0, KB):
        a = _unpack(_weight_tile(words, tiles, kb, KB, M), ASM)
        packed = tl.load(scales + rows * KB + kb)
        for j in tl.static_range(4):
            value = a[j].to(tl.float32) * _scale_of(packed, j)[:, None]
            at = rows[:, None] * K + kb * 128 + 32 * j + column[None, :]
            tl.store(out + at, value.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["num_pairs"])
def plan_tokens(
    ids, active, starts, pairs, num_pairs,
    E_PAD: tl.constexpr, P_PAD: tl.constexpr, SLOTS: tl.constexpr, S_PAD: tl.constexpr,
):  # fmt: skip
    """The chosen experts in rising order and their pairs; one program, no host decision.

    Slots past the last chosen expert are empty: their start is num_pairs.
    """
    index = tl.arange(0, P_PAD)
    valid = index < num_pairs
    flat = tl.load(ids + index, mask=valid, other=E_PAD - 1).to(tl.int32)
    key = tl.where(valid, flat * P_PAD + index, E_PAD * P_PAD + index)
    tl.store(pairs + index, tl.sort(key) % P_PAD, mask=valid)
    counts = tl.histogram(flat, E_PAD, mask=valid)
    chosen = (counts > 0).to(tl.int32)
    slot = tl.cumsum(chosen, 0) - chosen
    start = tl.cumsum(counts, 0) - counts
    tl.store(active + slot, tl.arange(0, E_PAD), mask=chosen > 0)
    tl.store(starts + slot, start, mask=chosen > 0)
    spare = tl.arange(0, S_PAD)
    unused = (spare >= tl.sum(chosen, 0)) & (spare <= SLOTS)
    tl.store(starts + spare, num_pairs, mask=unused)
    tl.store(active + spare, 0, mask=unused & (spare < SLOTS))


@triton.jit
def prepare_tokens(
    z, x, x_scale, K: tl.constexpr, K_PAD: tl.constexpr, FP8: tl.constexpr
):  # fmt: skip
    """x [T, K] float16 = z / x_scale with x_scale [T] the power of two that brings |x| below 2^14.

    Exact for every bfloat16 within 2^-28 of the row's largest. FP8 first rounds z to MXFP8 values.
    """
    t = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, K_PAD)
    row = tl.load(z + t * K + col, mask=col < K, other=0.0).to(tl.float32)
    if FP8:
        blocks = tl.trans(tl.reshape(row, (K_PAD // 32, 32)))
        row = tl.reshape(tl.trans(_round_mxfp8(blocks)), (K_PAD,))
    bits = tl.max(tl.abs(row), 0).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum((bits >> 23) - 13, 1), 253)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(x + t * K + col, (row * inverse).to(tl.float16), mask=col < K)
    tl.store(x_scale + t, scale)


@triton.jit
def combine_pairs(y, weights, out, N: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr):
    """out [T, N] = sum_j weights[t, j] y[t TOP_K + j], float32, in the order of j."""
    t = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = col < N
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        w = tl.load(weights + t * TOP_K + j)
        total += w * tl.load(y + (t * TOP_K + j) * N + col, mask=keep, other=0.0)
    tl.store(out + t * N + col, total, mask=keep)
