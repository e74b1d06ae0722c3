"""Where every copy of a token is computed, worked out by its sender alone (K3 report §5.2.1).

The tokens of an expert are ordered by (source rank, position) and cut into one segment for each
rank that computes some. A rank's rows are its own experts' segments, ascending, then those of its
redundant experts, ascending; a non-empty segment is padded to a multiple of `align`. So counts and
allocation fix the row of each copy before anything is sent, and the copies land grouped by expert.

All of it is tensor arithmetic on the device of its inputs; nothing is read by the host.

Legend: T tokens, k choices, P = T k pairs, R ranks, E experts, B = E / R.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The rows of every rank under one plan; equal on all ranks."""

    counts: Tensor
    """[R, E] int64, what was planned for."""
    alloc: Tensor
    """[R, E] int64, the plan."""
    starts: Tensor
    """[R, E] int64, first row of expert e's segment on rank d."""
    redundant: Tensor
    """[R, B] int64, each rank's redundant experts, ascending, then -1."""
    sizes: Tensor
    """[R, 2 B] int64, padded rows of each rank's own experts, then of its redundant ones."""

    @property
    def num_ranks(self) -> int:
        return self.counts.shape[0]

    @property
    def block(self) -> int:
        """B, the experts a rank owns."""
        return self.counts.shape[1] // self.num_ranks

    def received(self, rank: int) -> Tensor:
        """[R] int64: pairs that each rank sends to `rank`."""
        upper, first = self.counts.cumsum(0), self.alloc.cumsum(0)[rank] - self.alloc[rank]
        low = torch.maximum(upper - self.counts, first)
        high = torch.minimum(upper, first + self.alloc[rank])
        return (high - low).clamp_(min=0).sum(1)


def lay_out(counts: Tensor, alloc: Tensor, align: int = 1) -> Layout:
    """counts, alloc [R, E] int64 -> the rows of every rank."""
    num_ranks, num_experts = counts.shape
    block = num_experts // num_ranks
    expert = torch.arange(num_experts, device=counts.device)
    is_home = expert // block == torch.arange(num_ranks, device=counts.device)[:, None]
    padded = (alloc + (align - 1)) // align * align
    own, foreign = padded * is_home, padded * ~is_home
    starts = torch.where(
        is_home, own.cumsum(1) - own, own.sum(1, keepdim=True) + foreign.cumsum(1) - foreign
    )
    ranked = torch.where(foreign > 0, expert, num_experts).sort(1).values[:, :block]
    redundant = torch.where(ranked < num_experts, ranked, -1)
    at_home = padded.gather(1, expert.view(num_ranks, block))
    copies = padded.gather(1, redundant.clamp(min=0)) * (redundant >= 0)
    return Layout(counts, alloc, starts, redundant, torch.cat([at_home, copies], 1))


@dataclass(frozen=True)
class TokenMap:
    """The pairs of one rank: flat pair t k + j is copy j of token t."""

    rank: Tensor
    """[P] int64: who computes it; -1 for padding."""
    row: Tensor
    """[P] int64: its row there."""
    first: Tensor
    """[P] int64: the pair whose copy of the token travels; itself, or an earlier pair of the same
    token and rank."""

    @property
    def travels(self) -> Tensor:
        """[P] bool: pairs whose token is sent; the others are copied where it arrives."""
        index = torch.arange(self.first.numel(), device=self.first.device)
        return (self.first == index) & (self.rank >= 0)


def map_tokens(ids: Tensor, layout: Layout, source: int, *, share_copies: bool = True) -> TokenMap:
    """ids [T, k] int64 of rank `source`, -1 for padding -> where each pair goes.

    `share_copies`: a token whose experts meet on one rank travels there once.
    """
    flat = ids.reshape(-1)
    expert = flat.clamp(min=0)
    order = (
        _position_in_expert(flat, layout.counts[source]) + _before(layout.counts, source)[expert]
    )
    upper = layout.alloc.cumsum(0)
    # searchsorted over all experts at once: an expert's cuts and orders share its high bits
    cuts = (upper.T + (torch.arange(upper.shape[1], device=ids.device) << 32)[:, None]).reshape(-1)
    rank = torch.searchsorted(cuts, order + (expert << 32), right=True) - expert * len(upper)
    rank = rank.clamp_(max=len(upper) - 1)  # padding may lie past the last cut
    place = rank * upper.shape[1] + expert
    first_order = (upper - layout.alloc).view(-1)[place]
    row = layout.starts.view(-1)[place] + order - first_order
    rank, row = torch.where(flat >= 0, rank, -1), torch.where(flat >= 0, row, -1)
    return TokenMap(rank, row, _first_copies(rank.view(ids.shape), share_copies))


def _before(counts: Tensor, source: int) -> Tensor:
    """[E]: tokens of each expert held by the ranks before `source`."""
    return counts[:source].sum(0)


def _position_in_expert(flat: Tensor, load: Tensor) -> Tensor:
    """[P]: how many earlier pairs chose the same expert; meaningless for padding."""
    order = flat.argsort(stable=True)
    starts = load.cumsum(0) - load
    index = torch.arange(flat.numel(), device=flat.device)
    num_padding = (flat < 0).sum()  # they sort first
    position = index - num_padding - starts[flat[order].clamp(min=0)]
    return torch.empty_like(position).index_copy_(0, order, position)


def _first_copies(rank: Tensor, share: bool) -> Tensor:
    """rank [T, k] -> [P]: the first pair of the same token with the same rank."""
    num_tokens, top_k = rank.shape
    index = torch.arange(num_tokens * top_k, device=rank.device)
    if not share:
        return index
    same = (rank[:, :, None] == rank[:, None, :]).to(torch.uint8)
    return index // max(1, top_k) * top_k + same.argmax(2).view(-1)


def copies_pay(num_ranks: int, top_k: int) -> bool:
    """Whether sending a token once for each rank saves over a tenth of the bytes.

    k choices spread evenly meet R (1 - (1 - 1/R)^k) ranks: 7.1 of 16 at R = 8, 14.3 at R = 64.
    """
    return num_ranks * (1 - (1 - 1 / num_ranks) ** top_k) < 0.9 * top_k
