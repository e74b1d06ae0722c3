"""Decoding with Gated MLA over a paged latent cache (K3 report §2.1.2): the absorbed form.

A page holds the latents and rope parts of P consecutive positions of one sequence; a row's table
names its pages in order. Pages may lie apart in memory (they share a pool with KDA states).

Legend: B rows, T new tokens, H heads, R latent width, S positions, P page tokens, V value width.
"""

from typing import Any

import torch
from torch import Tensor

from openk3.errors import InputError
from openk3.ops.backends import triton_or_reference
from openk3.ops.precision import wide_dtype
from openk3.ops.triton_support import triton_runs


def _triton() -> Any:
    from openk3.ops.mla.triton_paged import latent_attention_triton

    return latent_attention_triton


def _triton_usable(
    *, device: torch.device, dtype: torch.dtype, latent: int = 512, rope: int = 64, **_: Any
) -> tuple[bool, str]:
    usable, reason = triton_runs(device)
    if not usable:
        return False, reason
    if dtype not in (torch.bfloat16, torch.float16):
        return False, f"the kernel multiplies in 16-bit floats, not {dtype}"
    if any(x < 16 or x & (x - 1) for x in (latent, rope)):
        return False, f"the kernel takes powers of two from 16, not {latent} and {rope}"
    return True, reason


BACKENDS = triton_or_reference(
    "mla_paged", _triton_usable, _triton, lambda: latent_attention_reference
)


def attend_paged(
    q: Tensor,
    kv_b: Tensor,
    pages: Tensor,
    table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    first: int = 0,
    backend: str | None = None,
) -> Tensor:
    """T new tokens of B sequences attend to all their positions. No gradients.

    q [B,T,H,D] with D = nope + rope; kv_b [H * (nope + V), R], per head [k_nope | v]; pages
    [num_pages, P, R + rope], the new tokens' included, each page contiguous; table [B, N] integer
    page ids, of which the first ceil(lengths / P) count (the others must be valid ids). starts [B]
    is the position of a row's first new token, lengths [B] how many positions it holds, new ones
    included: those beyond, of tokens that only fill a row up, are seen by nobody, and neither are
    those before `first`. A row of length 0 is padding and gives zeros. scale None is D ** -0.5.
    Returns o [B,T,H,V] in q's dtype.
    Raises InputError, BackendError.
    """
    batch, tokens, heads, width = q.shape
    latent = kv_b.shape[1]
    rope = pages.shape[2] - latent
    per_head = kv_b.shape[0] // heads
    nope = width - rope
    if rope < 0 or nope <= 0 or kv_b.shape[0] % heads or per_head <= nope:
        raise InputError(
            f"q of width {width}, kv_b {list(kv_b.shape)} and pages of {pages.shape[2]} numbers a "
            f"token do not fit {heads} heads"
        )
    if table.ndim != 2 or {table.shape[0], *starts.shape, *lengths.shape} != {batch}:
        raise InputError(
            f"table {list(table.shape)}, starts {list(starts.shape)} and lengths "
            f"{list(lengths.shape)} must have {batch} rows"
        )
    chosen = BACKENDS.resolve(backend, device=q.device, dtype=q.dtype, latent=latent, rope=rope)
    up = kv_b.view(heads, per_head, latent)
    q_HND = q.flatten(0, 1).transpose(0, 1)
    q_latent = torch.bmm(q_HND[..., :nope], up[:, :nope]).transpose(0, 1)
    joined = torch.cat([q_latent, q.flatten(0, 1)[..., nope:]], -1).unflatten(0, (batch, tokens))
    scale = float(width**-0.5) if scale is None else scale
    o_BTHR = chosen.load()(joined, pages, table, starts, lengths, latent, scale, first)
    o_HNR = o_BTHR.flatten(0, 1).transpose(0, 1)
    return torch.bmm(o_HNR, up[:, nope:].transpose(1, 2)).transpose(0, 1).unflatten(0, (batch, -1))


@torch.no_grad()
def latent_attention_reference(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    latent: int,
    scale: float,
    first: int = 0,
) -> Tensor:
    """softmax(scale q k^T) v, keys the pages' rows, values their first `latent` numbers.

    q [B,T,H,R + rope] -> [B,T,H,R].
    """
    batch, tokens, heads = q.shape[:3]
    size = pages.shape[1]
    needed = -(-int(lengths.max()) // size) if batch else 0
    keys_BSD = pages[table[:, :needed].long()].flatten(1, 2)
    position = torch.arange(keys_BSD.shape[1], device=q.device)
    # what lies behind a sequence's end may be anything, also NaN
    nobodys = (position >= lengths[:, None]) | (position < first)
    keys_BSD = keys_BSD.masked_fill(nobodys[..., None], 0)
    last = starts[:, None] + torch.arange(tokens, device=q.device)
    hidden_BTS = position > torch.minimum(last, lengths[:, None] - 1)[..., None]
    hidden_BTS |= position < first
    scores = (q.flatten(1, 2) @ keys_BSD.transpose(1, 2)).to(wide_dtype(q)) * scale
    scores = scores.unflatten(1, (tokens, heads)).masked_fill(hidden_BTS[:, :, None], -torch.inf)
    weights = scores.softmax(-1).to(q.dtype).flatten(1, 2)
    o = (weights @ keys_BSD[..., :latent]).unflatten(1, (tokens, heads))
    return o.masked_fill((lengths == 0)[:, None, None, None], 0.0)
