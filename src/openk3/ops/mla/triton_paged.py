"""Gated MLA's decoding attention in Triton: split over the sequence, then merged (see `paged`).

A program owns some query rows (new token and head) of one sequence and a share of its positions;
keys and values are one read of the latents. Shares are merged by their log-sum-exp.

Legend: B rows, T new tokens, H heads, M = T H query rows, R latent width, S shares, P page tokens.
"""

# Calls between jit functions look to a type checker like calls from Python.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from openk3.ops.triton_support import launch, num_sms

BLOCK_N = 32
MAX_SHARES = 128
MERGED = 16384  # numbers that a merging program holds
LOG2E = 1.4426950408889634


@triton.jit(do_not_specialize=["table_width", "num_shares"])
def share_kernel(
    q,  # [B, M, R + ROPE]
    pages,  # [num_pages, P, R + ROPE], page_stride numbers from page to page
    table,  # [B, table_width] int32
    starts,  # [B] int64
    lengths,  # [B] int64
    partial,  # [B, M, S, R] float32
    peaks,  # [B, M, S] float32: log2 of the sum of exponentials
    M,
    P,
    page_stride,
    table_width,
    num_shares,
    scale,
    H: tl.constexpr,
    R: tl.constexpr,
    ROPE: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    r, rope = tl.arange(0, R), tl.arange(0, ROPE)
    length = tl.load(lengths + row)
    last = tl.minimum(tl.load(starts + row) + m // H, length - 1)
    q += (row * M + m[:, None]) * (R + ROPE)
    q_latent = tl.load(q + r[None, :], m[:, None] < M, 0.0)
    q_rope = tl.load(q + R + rope[None, :], m[:, None] < M, 0.0)

    size = tl.cdiv(tl.cdiv(length, num_shares), BLOCK_N) * BLOCK_N
    begin = share * size
    end = tl.minimum(begin + size, length)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, R], tl.float32)
    for first in range(begin, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        page = tl.load(table + row * table_width + n // P, n < end, 0).to(tl.int64)
        key = pages + page * page_stride + (n % P) * (R + ROPE)
        k_latent = tl.load(key[:, None] + r[None, :], n[:, None] < end, 0.0)
        k_rope = tl.load(key[:, None] + R + rope[None, :], n[:, None] < end, 0.0)
        scores = tl.dot(q_latent, k_latent.T) + tl.dot(q_rope, k_rope.T)
        seen = (n[None, :] <= last[:, None]) & (n[None, :] < end) & (n[None, :] >= FIRST)
        scores = tl.where(seen, scores * scale, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = tl.exp2(scores - safe[:, None])
        decay = tl.exp2(peak - safe)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.dot(weights.to(k_latent.dtype), k_latent)
        peak = new_peak
    found = total > 0
    at = (row * M + m) * num_shares + share
    o = acc / tl.where(found, total, 1.0)[:, None]
    tl.store(partial + at[:, None] * R + r[None, :], o, m[:, None] < M)
    log = tl.where(found, peak + tl.log2(tl.where(found, total, 1.0)), -float("inf"))
    tl.store(peaks + at, log, m < M)


@triton.jit
def merge_kernel(partial, peaks, o, R: tl.constexpr, SHARES: tl.constexpr, BLOCK_R: tl.constexpr):
    """o [B * M, R] from the shares, BLOCK_R numbers of a row at a time."""
    at = tl.program_id(0).to(tl.int64)
    s, r = tl.arange(0, SHARES), tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    log = tl.load(peaks + at * SHARES + s)
    peak = tl.max(log, 0)
    weights = tl.exp2(log - tl.where(peak == -float("inf"), 0.0, peak))
    total = tl.sum(weights, 0)
    shares = tl.load(partial + (at * SHARES + s[:, None]) * R + r[None, :])
    mixed = tl.sum(shares * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(o + at * R + r, mixed.to(o.dtype.element_ty))


@torch.no_grad()
def latent_attention_triton(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    latent: int,
    scale: float,
    first: int = 0,
) -> Tensor:
    """`paged.latent_attention_reference` in two kernels."""
    batch, tokens, heads, width = q.shape
    rows = tokens * heads
    block = 32 if rows > 16 else 16
    tiles = triton.cdiv(rows, block)
    shares = _shares(batch * tiles, num_sms(q.device))
    partial = torch.empty(batch, rows, shares, latent, dtype=torch.float32, device=q.device)
    peaks = torch.empty(batch, rows, shares, dtype=torch.float32, device=q.device)
    o = torch.empty(batch, tokens, heads, latent, dtype=q.dtype, device=q.device)
    assert pages[0].is_contiguous(), "a page's latents must lie together"
    launch(
        share_kernel,
        (batch, tiles, shares),
        q.contiguous(),
        pages,
        table.int().contiguous(),
        starts,
        lengths,
        partial,
        peaks,
        M=rows,
        P=pages.shape[1],
        page_stride=pages.stride(0),
        table_width=table.shape[1],
        num_shares=shares,
        scale=scale * LOG2E,
        H=heads,
        R=latent,
        ROPE=width - latent,
        FIRST=first,
        BLOCK_M=block,
        BLOCK_N=BLOCK_N,
        num_warps=8 if block == 32 else 4,
        num_stages=2,
    )
    width = min(latent, max(16, MERGED // shares))
    grid = batch * rows, latent // width
    launch(
        merge_kernel, grid, partial, peaks, o, R=latent, SHARES=shares, BLOCK_R=width, num_warps=4
    )
    return o


def _shares(programs: int, sms: int) -> int:
    """Into how many shares a sequence is split, so that two waves of programs fill the chip."""
    shares = 1
    while shares < MAX_SHARES and programs * shares * 2 <= 2 * sms:
        shares *= 2
    return shares
