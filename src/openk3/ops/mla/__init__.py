"""Gated MLA's attention core (K3 report §2.1.2): softmax over a latent cache, no positions.

A key is [k_nope | k_rope]: the first part comes from the latent by a per-head matrix, the second is
one un-rotated vector shared by all heads. Two exact forms: `expanded` builds keys and values per
head (prefill and training); `absorbed` moves the matrices onto the query and the output, so that
attention runs on the latents themselves (decoding).

Legend: B batch, T queries, S keys, H heads, R latent width, D key width, V value width.
"""

from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from openk3.errors import InputError
from openk3.ops.packed import length_groups, sequence_lengths
from openk3.ops.precision import wide_dtype

Form = Literal["expanded", "absorbed"]
MAX_SCORES = 1 << 26  # scores held at once when their maxima are wanted
MAX_MASKED = 1 << 29  # scores held at once when new queries follow cached positions
ABSORB_BELOW = 8  # new tokens, on a GPU: its expanded form runs fused kernels


def attend(
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    form: Form | None = "expanded",
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of T queries over S >= T cached positions; the last T positions are the
    queries'.

    q [B,T,H,D] with D = nope + rope; latent [B,S,R] normed; k_rope [B,S,rope]; kv_b
    [H * (nope + V), R], per head [k_nope | v]. scale None is D ** -0.5. cu_seqlens [N + 1] packs
    N sequences in one row (B = 1, S = T). form None takes the `cheaper_form`. Softmax in float32.
    Returns o [B,T,H,V] in q's dtype and, if asked, each head's largest scaled score [H] float32
    (without gradient; for weight clipping). Raises InputError on shapes that do not fit.
    """
    batch, tokens, heads, width = q.shape
    rope, total = k_rope.shape[-1], kv_b.shape[0] // heads
    nope = width - rope
    if kv_b.shape[0] % heads or total <= nope or kv_b.shape[1] != latent.shape[-1]:
        raise InputError(
            f"kv_b {list(kv_b.shape)} does not fit {heads} heads of key width {nope} + {rope} "
            f"over a latent of {latent.shape[-1]}"
        )
    if latent.shape[1] < tokens:
        raise InputError(f"{tokens} queries need at least as many keys, not {latent.shape[1]}")
    scale = float(width**-0.5) if scale is None else scale
    form = form or cheaper_form(q, latent, k_rope, kv_b)
    core = _expanded if form == "expanded" else _absorbed
    if cu_seqlens is None:
        o, peak = core(q, latent, k_rope, kv_b, scale, return_max_logits)
    else:
        lengths = sequence_lengths(batch, tokens, cu_seqlens)
        o, peak = _packed(core, q, latent, k_rope, kv_b, scale, return_max_logits, lengths)
    return (o, peak) if peak is not None else o


def cheaper_form(q: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor) -> Form:
    """The form with fewer multiplications; arguments as of `attend`.

    A few new tokens behind many cached ones are cheaper absorbed: nothing is expanded for them.
    """
    tokens, heads, width = q.shape[1:]
    keys, rope = latent.shape[1], k_rope.shape[-1]
    if q.is_cuda:
        return "absorbed" if tokens < ABSORB_BELOW else "expanded"
    if q.shape[0] * heads * tokens * keys > MAX_SCORES:
        return "expanded"  # the absorbed form holds all scores at once
    sizes = (heads, width - rope, rope, kv_b.shape[0] // heads - width + rope, kv_b.shape[1])
    expanded, absorbed = multiplications(tokens, keys, *sizes)
    return "absorbed" if absorbed < expanded else "expanded"


def multiplications(
    tokens: int, keys: int, heads: int, nope: int, rope: int, value: int, latent: int
) -> tuple[int, int]:
    """Of the expanded and of the absorbed form, for one sequence."""
    up = heads * latent * (nope + value)
    expanded = keys * up + tokens * keys * heads * (nope + rope + value)
    absorbed = tokens * up + tokens * keys * heads * (2 * latent + rope)
    return expanded, absorbed


def expand(
    latent: Tensor, k_rope: Tensor, kv_b: Tensor, heads: int, nope: int
) -> tuple[Tensor, Tensor]:
    """latent [B,S,R], k_rope [B,S,rope] -> keys [B,S,H,nope + rope], values [B,S,H,V]."""
    kv = F.linear(latent, kv_b).unflatten(-1, (heads, -1))
    k_nope, v = kv[..., :nope], kv[..., nope:]
    shared = k_rope[:, :, None].expand(-1, -1, heads, -1)
    return torch.cat([k_nope, shared], -1), v


def _packed(
    core: Any,
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    kv_b: Tensor,
    scale: float,
    want_peak: bool,
    lengths: list[int],
) -> tuple[Tensor, Any]:
    """The sequences of a row, those of similar length as one batch.

    A batch is padded behind its sequences: causal queries never see that, and what padded queries
    compute is dropped. As their keys' and values' copies they repeat the sequence's last token, so
    a padded query's scores are scores of a real query over its own past.
    """
    starts = [0, *accumulate(lengths)]
    outputs, places, peaks = [], [], []
    for group in length_groups(lengths):
        last = torch.tensor([[lengths[n] - 1] for n in group])
        position = torch.arange(int(last.max()) + 1)
        index = torch.tensor([[starts[n]] for n in group]) + torch.minimum(position, last)
        kept = (position <= last).flatten().nonzero()[:, 0]
        places.append(index.flatten()[kept])
        index, kept = index.to(q.device), kept.to(q.device)
        o, peak = core(*(x[0, index] for x in (q, latent, k_rope)), kv_b, scale, want_peak)
        outputs.append(o.flatten(0, 1)[kept])
        peaks.append(peak)
    order = torch.cat(places).argsort().to(q.device)
    return torch.cat(outputs)[order][None], torch.stack(peaks).amax(0) if want_peak else None


def _expanded(q, latent, k_rope, kv_b, scale, want_peak) -> tuple[Tensor, Any]:
    heads, width = q.shape[2:]
    k, v = expand(latent, k_rope, kv_b, heads, width - k_rope.shape[-1])
    q_BHTD, k_BHSD, v_BHSV = (x.transpose(1, 2) for x in (q, k, v))
    mask = _causal_mask(q.shape[1], k.shape[1], q.device)
    if want_peak and q_BHTD.shape[:3].numel() * k.shape[1] <= MAX_SCORES:
        o, peak = _explicit(q_BHTD, k_BHSD, v_BHSV, mask, scale)
        return o.transpose(1, 2), peak
    square = mask is not None and q.shape[1] == k.shape[1]
    pieces = [slice(None)]
    if mask is not None and not square:
        # with a mask the scores of all queries may be held at once; a few at a time are not many
        rows = max(1, MAX_MASKED // (q_BHTD.shape[:2].numel() * k.shape[1]))
        pieces = [slice(i, i + rows) for i in range(0, q.shape[1], rows)]
    outputs = [
        F.scaled_dot_product_attention(
            q_BHTD[:, :, here],
            k_BHSD,
            v_BHSV,
            None if square or mask is None else mask[here],
            is_causal=square,
            scale=scale,
        )
        for here in pieces
    ]
    o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    peak = _peak(q_BHTD, k_BHSD, mask, scale) if want_peak else None
    return o.transpose(1, 2), peak


def _explicit(q_BHTD, k_BHSD, v_BHSV, mask, scale) -> tuple[Tensor, Tensor]:
    """Attention that shows its scores, so that their maxima cost no second product."""
    wide = wide_dtype(q_BHTD)
    scores = ((q_BHTD * scale) @ k_BHSD.transpose(-1, -2)).to(wide)
    if mask is not None:
        scores = scores + torch.zeros_like(mask, dtype=wide).masked_fill_(~mask, -torch.inf)
    peak = scores.detach().amax((2, 3)).amax(0)
    return scores.softmax(-1).to(v_BHSV.dtype) @ v_BHSV, peak


def _absorbed(q, latent, k_rope, kv_b, scale, want_peak) -> tuple[Tensor, Any]:
    heads, width = q.shape[2:]
    nope = width - k_rope.shape[-1]
    up = kv_b.view(heads, -1, kv_b.shape[1])
    k_up, v_up = up[:, :nope], up[:, nope:]
    q_latent = torch.einsum("bthn,hnr->bthr", q[..., :nope], k_up)
    wide = wide_dtype(q)
    scores = torch.einsum("bthr,bsr->bhts", q_latent.to(wide), latent.to(wide))
    scores = scores + torch.einsum("bthd,bsd->bhts", q[..., nope:].to(wide), k_rope.to(wide))
    scores = scores * scale
    mask = _causal_mask(q.shape[1], latent.shape[1], q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1).to(q.dtype)
    o_latent = torch.einsum("bhts,bsr->bthr", weights, latent)
    peak = scores.detach().amax((2, 3)).amax(0) if want_peak else None
    return torch.einsum("bthr,hvr->bthv", o_latent, v_up), peak


def _causal_mask(tokens: int, keys: int, device: torch.device) -> Tensor | None:
    """[T, S] bool, or None when a single query may see every key."""
    if tokens == 1:
        return None
    return torch.ones(tokens, keys, dtype=torch.bool, device=device).tril(keys - tokens)


@torch.no_grad()
def _peak(q_BHTD: Tensor, k_BHSD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Largest score of each head [H], a few queries at a time."""
    rows = max(1, MAX_SCORES // (q_BHTD.shape[:2].numel() * k_BHSD.shape[2]))
    peaks = []
    for start in range(0, q_BHTD.shape[2], rows):
        here = slice(start, start + rows)
        scores = (q_BHTD[:, :, here] @ k_BHSD.transpose(-1, -2)).float() * scale
        if mask is not None:
            scores = scores.masked_fill_(~mask[here], -torch.inf)
        peaks.append(scores.amax((2, 3)).amax(0))
    return torch.stack(peaks).amax(0)
