"""How ragged sequences lie in chunks, so that the scan over chunks is batched without waste.

Sequences are sorted longest first and chunks are stored by step: chunk 0 of every sequence, then
chunk 1 of those that have one, and so on. Step c then touches the first `active[c]` sequences only.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from openk3.ops.packed import Gather, Scatter


@dataclass(frozen=True)
class ChunkLayout:
    """Where each token lies. M chunks of C slots hold the tokens; unused slots are zero."""

    slots: Tensor
    """[tokens] int64: slot m * C + c of each token in flat order."""
    order: Tensor
    """[N] int64: sequences, longest first."""
    inverse_order: Tensor
    """[N] int64: where each sequence went."""
    active: tuple[int, ...]
    """Sequences alive at each scan step; their sum is M."""
    chunk_size: int
    uniform: tuple[int, int] | None
    """(sequences, chunks of each) when every length is the same multiple of C: a mere reshape."""

    @property
    def num_tokens(self) -> int:
        return self.slots.numel()

    @property
    def num_chunks(self) -> int:
        return sum(self.active)

    def to_chunks(self, x: Tensor) -> Tensor:
        """x [B,T,H,D] -> [M,H,C,D], zero in unused slots."""
        heads, dim = x.shape[2:]
        if self.uniform is not None:
            n, m = self.uniform
            chunks = x.reshape(n, m, self.chunk_size, heads, dim)
            return chunks.permute(1, 0, 3, 2, 4).reshape(n * m, heads, self.chunk_size, dim)
        rows = Scatter.apply(x.flatten(0, 1), self.slots, self.num_chunks * self.chunk_size)
        return rows.view(-1, self.chunk_size, heads, dim).transpose(1, 2)

    def to_tokens(self, x: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """x [M,H,C,D] -> [tokens,H,D]."""
        if self.uniform is not None:
            n, m = self.uniform
            heads, dim = shape[1:]
            rows = x.view(m, n, heads, self.chunk_size, dim).permute(1, 0, 3, 2, 4)
            return rows.reshape(shape)
        return Gather.apply(x.transpose(1, 2).flatten(0, 1), self.slots)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # what generating caches, training saves for backward
def chunk_layout(lengths: tuple[int, ...], chunk_size: int, device: torch.device) -> ChunkLayout:
    """The layout of sequences of these lengths (empty ones allowed)."""
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    chunks = [-(-length // chunk_size) for length in lengths]
    steps = max(chunks, default=0)
    active = tuple(sum(m > c for m in chunks) for c in range(steps))
    first = torch.tensor([0, *active]).cumsum(0)  # first chunk of each step
    rank = torch.empty(len(lengths), dtype=torch.int64)
    rank[torch.tensor(order, dtype=torch.int64)] = torch.arange(len(lengths))
    pieces = []
    for n, length in enumerate(lengths):
        t = torch.arange(length)
        pieces.append((first[t // chunk_size] + rank[n]) * chunk_size + t % chunk_size)
    slots = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
    even = bool(lengths) and len(set(lengths)) == 1 and lengths[0] % chunk_size == 0
    return ChunkLayout(
        slots=slots.to(device),
        order=torch.tensor(order, dtype=torch.int64, device=device),
        inverse_order=rank.to(device),
        active=active,
        chunk_size=chunk_size,
        uniform=(len(lengths), steps) if even and steps else None,
    )
