"""Prefill with Gated MLA over a paged latent cache (K3 report §2.1.2): chunks of several prompts.

Each chunk's queries are the last positions of its sequence and see everything before them. On a GPU
all chunks go through one call of torch's flash attention over packed rows: `attend` chunk by chunk
needs a mask where positions are cached, and a plan of cuDNN's for each new pair of lengths.

Legend: C chunks, N queries in all, S positions in all, H heads, R latent width, D key width, V
value width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from openk3.errors import InputError
from openk3.ops.backends import Backend, BackendTable, always
from openk3.ops.mla import attend, expand

MAX_EXPANDED = 1 << 30  # numbers of keys, or of values, that are held at once
FLASH_WIDTH = 256


class Held(NamedTuple):
    """Where the positions of C sequences lie, one sequence after the other."""

    page: Tensor
    """[S] int64"""
    offset: Tensor
    """[S] int64, within the page"""
    cu_keys: Tensor
    """[C + 1] int32: where a sequence's positions begin"""
    cu_queries: Tensor
    """[C + 1] int32: where a chunk's queries begin"""
    num_keys: tuple[int, ...]
    num_queries: tuple[int, ...]


def hold(
    table: Tensor, counts: Tensor, num_keys: Sequence[int], num_queries: Sequence[int],
    page_tokens: int,
) -> Held:  # fmt: skip
    """table [C, pages] integer: the pages of each sequence, in order; its device also has `counts`
    [2, C] int64: num_keys, num_queries."""
    starts = F.pad(counts.cumsum(1), (1, 0))
    row = torch.repeat_interleave(counts[0], output_size=sum(num_keys))
    position = torch.arange(len(row), device=table.device) - starts[0, row]
    page = table[row, position // page_tokens].long()
    cu_keys, cu_queries = starts.int().unbind()
    return Held(
        page, position % page_tokens, cu_keys, cu_queries, tuple(num_keys), tuple(num_queries)
    )


def attend_chunks(
    q: Tensor,
    kv_b: Tensor,
    pages: Tensor,
    held: Held,
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Causal attention of each chunk's queries over its sequence. No gradients.

    q [N,H,D] with D = nope + rope; kv_b [H * (nope + V), R], per head [k_nope | v]; pages
    [num_pages, P, R + rope], the queries' own latents included. scale None is D ** -0.5. Returns
    o [N,H,V] in q's dtype. Raises InputError, BackendError.
    """
    heads, width = q.shape[1:]
    rope = pages.shape[2] - kv_b.shape[1]
    value = kv_b.shape[0] // heads - width + rope
    if not 0 <= rope < width or kv_b.shape[0] % heads or value <= 0:
        raise InputError(
            f"q of width {width}, kv_b {list(kv_b.shape)} and pages of {pages.shape[2]} numbers a "
            f"token do not fit {heads} heads"
        )
    if len(q) != sum(held.num_queries):
        raise InputError(f"{sum(held.num_queries)} queries were announced, not {len(q)}")
    facts = {"device": q.device, "dtype": q.dtype, "width": max(width, value)}
    run = BACKENDS.resolve(backend, **facts).load()
    seen = pages[held.page, held.offset][None]
    latent, k_rope = seen[..., : kv_b.shape[1]], seen[..., kv_b.shape[1] :]
    return run(q, latent, k_rope, kv_b, held, float(width**-0.5) if scale is None else scale)


def chunk_by_chunk(
    q: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor, held: Held, scale: float
) -> Tensor:
    """The reference, each chunk in its cheaper form: q [N,H,D], latent [1,S,R], k_rope [1,S,rope],
    kv_b as of `attend_chunks` -> [N,H,V]."""
    parts = zip(
        q.split(held.num_queries),
        latent.split(held.num_keys, 1),
        k_rope.split(held.num_keys, 1),
        strict=True,
    )
    found: list[Any] = [attend(x[None], y, z, kv_b, scale=scale, form=None) for x, y, z in parts]
    return torch.cat(found, 1)[0] if len(found) > 1 else found[0][0]


def all_at_once(
    q: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor, held: Held, scale: float
) -> Tensor:
    """As `chunk_by_chunk`, some heads at a time if there are many positions."""
    heads, width = q.shape[1:]
    nope, per_head = width - k_rope.shape[-1], kv_b.shape[0] // heads
    value = per_head - nope
    padded = -(-max(width, value) // 8) * 8
    some = max(1, MAX_EXPANDED // (padded * latent.shape[1]))
    found = []
    for own, up in zip(q.split(some, 1), kv_b.split(some * per_head), strict=True):
        k, v = expand(latent, k_rope, up, own.shape[1], nope)
        x, y, z = (_widened(part, padded) for part in (own, k[0], v[0]))
        found.append(_flash(x, y, z, held, scale)[..., :value])
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def _widened(x: Tensor, width: int) -> Tensor:
    """x [..., D] with zeros behind, up to `width`."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _flash(q: Tensor, k: Tensor, v: Tensor, held: Held, scale: float) -> Tensor:
    """q [N,H,D], k, v [S,H,D] -> [N,H,D]; queries are a sequence's last. What
    torch.nn.attention.varlen calls, whose own arguments differ between the versions of torch."""
    return torch.ops.aten._flash_attention_forward(
        q, k, v, held.cu_queries, held.cu_keys, max(held.num_queries), max(held.num_keys),
        0.0, True, False, scale=scale,
    )[0]  # fmt: skip


def _flash_usable(
    *, device: torch.device, dtype: torch.dtype, width: int = 192, **_: Any
) -> tuple[bool, str]:
    if device.type != "cuda" or torch.version.cuda is None:
        return False, f"flash attention needs an NVIDIA GPU; the tensors are on {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False, "flash attention needs compute capability 8.0"
    if dtype not in (torch.bfloat16, torch.float16) or width > FLASH_WIDTH:
        return False, f"flash attention takes 16-bit heads up to {FLASH_WIDTH}, not {dtype} {width}"
    return True, f"torch's flash attention on {torch.cuda.get_device_name(device)}"


BACKENDS = BackendTable(
    "mla_prefill",
    [
        Backend("flash", "an NVIDIA GPU", _flash_usable, lambda: all_at_once),
        Backend("reference", "nothing", always, lambda: chunk_by_chunk),
    ],
)
