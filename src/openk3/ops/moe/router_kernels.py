"""Triton kernels of the router: the choice of experts and the counts of Quantile Balancing.

Legend: T tokens, E experts, k experts a token.
"""

import triton
import triton.language as tl


@triton.jit
def _add_margins(counts, score, limit, bias, expert, real, counted, BINS: tl.constexpr):
    """Count limit - score [BT, E_PAD] in counts [E, BINS], bins as `bin_range` makes them."""
    low = tl.min(tl.where(real, bias, float("inf")), 0) - 1.0
    high = tl.max(tl.where(real, bias, -float("inf")), 0) + 1.0
    width = tl.div_rn(high - low, BINS * 1.0)
    bins = tl.div_rn(limit[:, None] - score - low, width + tl.zeros_like(score)).to(tl.int32)
    bins = tl.minimum(tl.maximum(bins, 0), BINS - 1)
    one = tl.full(bins.shape, 1, counts.dtype.element_ty)
    tl.atomic_add(counts + expert[None, :] * BINS + bins, one, mask=counted, sem="relaxed")


@triton.jit(do_not_specialize=["T"])
def count_scores(
    scores, cutoff, bias, valid, counts, T,
    E: tl.constexpr, E_PAD: tl.constexpr, BT: tl.constexpr, BINS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the margins of scores [T, E] float32 to counts [E, BINS]."""
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    expert = tl.arange(0, E_PAD)
    real = expert < E
    counted = (row < T)[:, None] & real[None, :]
    offs = row.to(tl.int64)[:, None] * E + expert[None, :]
    score = tl.load(scores + offs, mask=counted, other=0.0)
    limit = tl.load(cutoff + row, mask=row < T, other=0.0)
    if MASKED:
        counted = counted & (tl.load(valid + row, mask=row < T, other=0) != 0)[:, None]
    b = tl.load(bias + expert, mask=real, other=0.0)
    _add_margins(counts, score, limit, b, expert, real, counted, BINS)


@triton.jit(do_not_specialize=["T"])
def choose_experts(
    logits, bias, valid, ids, weights, cutoff, chosen, counts, T, scaling,
    E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
    BT: tl.constexpr, BINS: tl.constexpr, COUNT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The k best of sigmoid(logit) + bias, the lower id first among equals, and their weights.

    ids [T, k] int64, weights and chosen (their scores) [T, k] float32, cutoff [T] the next.
    COUNT: add each expert's margin cutoff - score to counts [E, BINS] int32, whose bins span
    [min(bias) - 1, max(bias) + 1]; rows with valid false are left out.
    """
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    in_range = row < T
    expert = tl.arange(0, E_PAD)
    real = expert < E
    offs = row.to(tl.int64)[:, None] * E + expert[None, :]
    mask = in_range[:, None] & real[None, :]
    score = 1.0 / (1.0 + tl.exp(-tl.load(logits + offs, mask=mask, other=0.0)))
    b = tl.load(bias + expert, mask=real, other=0.0)
    key = score + b[None, :]
    key = tl.where(key == key, key, 1e30)  # a NaN is chosen, lest an expert that is none were
    key = tl.where(real[None, :], key, -float("inf"))
    slot = tl.arange(0, K_PAD)
    best_id = tl.zeros([BT, K_PAD], tl.int32)
    best = tl.zeros([BT, K_PAD], tl.float32)
    for j in tl.static_range(TOP_K):
        winner = tl.argmax(key, 1)
        hit = expert[None, :] == winner[:, None]
        value = tl.sum(tl.where(hit, score, 0.0), 1)
        best_id = tl.where(slot[None, :] == j, winner[:, None], best_id)
        best = tl.where(slot[None, :] == j, value[:, None], best)
        key = tl.where(hit, -float("inf"), key)
    limit = tl.max(key, 1)
    total = tl.sum(best, 1) + 1e-20
    out = row.to(tl.int64)[:, None] * TOP_K + slot[None, :]
    keep = in_range[:, None] & (slot < TOP_K)[None, :]
    tl.store(ids + out, best_id.to(tl.int64), mask=keep)
    tl.store(weights + out, best / total[:, None] * scaling, mask=keep)
    tl.store(chosen + out, best, mask=keep)
    tl.store(cutoff + row, limit, mask=in_range)
    if COUNT:
        counted = mask
        if MASKED:
            counted = mask & (tl.load(valid + row, mask=in_range, other=0) != 0)[:, None]
        _add_margins(counts, score, limit, b, expert, real, counted, BINS)


@triton.jit(do_not_specialize=["T"])
def choose_backward(
    d_weights, ids, chosen, d_logits, T, scaling,
    E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """d_logits [T, E], zero at experts not chosen; one program a token."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E_PAD)
    total = 1e-20
    dot = 0.0
    for j in tl.static_range(TOP_K):
        c = tl.load(chosen + row * TOP_K + j)
        total += c
        dot += c * tl.load(d_weights + row * TOP_K + j)
    grad = tl.zeros([E_PAD], tl.float32)
    for j in tl.static_range(TOP_K):
        c = tl.load(chosen + row * TOP_K + j)
        d = tl.load(d_weights + row * TOP_K + j)
        value = scaling * (d - dot / total) / total * c * (1 - c)
        grad = tl.where(expert == tl.load(ids + row * TOP_K + j), value, grad)
    tl.store(d_logits + row * E + expert, grad, mask=expert < E)
