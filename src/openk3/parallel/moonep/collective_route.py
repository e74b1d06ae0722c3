"""The tables by which collectives move one layer's tokens: split sizes and orders.

Rank r sends each token that has work on rank d there once, in the order of its tokens, after
announcing for every pair of token and choice the row it takes, the place of its token in that
message and its router weight.

Legend: T tokens, k choices, R ranks, N rows here, P pairs sent, U tokens sent, B = E / R.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from openk3.parallel.alltoall import exchange
from openk3.parallel.moonep.sums import Groups, group
from openk3.parallel.moonep.token_map import Layout, TokenMap
from openk3.parallel.moonep.transport import Route


@dataclass
class Splits:
    """Per rank: how many go there, how many come from there."""

    sent: list[int]
    received: list[int]


@dataclass(kw_only=True)
class CollectiveRoute(Route):
    tokens: Splits
    pairs: Splits
    copies: Splits
    """Experts: lent to each rank, borrowed from it."""
    any_copies: bool
    """Whether any rank borrows."""
    lent: Tensor
    """Own experts, by number within the block, in the order in which they are sent."""
    token_sent: Groups
    """[U]: the token of each row sent."""
    top_k: int
    num_arriving: int
    """Tokens received; row_source counts one more, the source of padding rows."""
    pair_sent: Tensor
    """[P]: the pair of each row announced."""
    pair_row: Tensor
    """The row of each pair in the order in which they were announced here."""
    row_source: Groups
    """[N]: the received token of each row."""


def open_route(
    layout: Layout, tokens: TokenMap, weights: Tensor, pg: dist.ProcessGroup, *, split: bool
) -> CollectiveRoute:
    """Exchange sizes, then announcements. weights [T, k].

    `split`: tell the products on the host where the rows of own experts end.
    """
    sizes = _read_sizes(layout, tokens, pg)
    pair_sent = _by_rank(tokens.rank, tokens.rank >= 0, sum(sizes.pairs.sent))
    traveller = _by_rank(tokens.rank, tokens.travels, sum(sizes.tokens.sent))
    place = torch.zeros_like(tokens.first)
    place[traveller] = _count_within(sizes.tokens.sent, tokens.rank.device)
    message = torch.stack(
        [
            tokens.row[pair_sent].to(torch.int32),
            place[tokens.first[pair_sent]].to(torch.int32),
            weights.detach().float().reshape(-1)[pair_sent].view(torch.int32),
        ],
        1,
    )
    announced = exchange(message, sizes.pairs.received, sizes.pairs.sent, pg)
    row = announced[:, 0].long()
    first = _spread(_starts(sizes.tokens.received), sizes.pairs.received, row.device)
    arriving = sum(sizes.tokens.received)
    source = row.new_full((sizes.num_rows,), arriving)
    source[row] = announced[:, 1] + first
    bits = announced.new_zeros(sizes.num_rows)
    bits[row] = announced[:, 2]
    copies, lent = _lending(sizes.redundant, layout.block, pg.rank())
    return CollectiveRoute(
        layout=layout,
        weights=bits.view(torch.float32),
        ends=layout.sizes[pg.rank()].cumsum(0).to(torch.int32),
        num_own=sizes.num_own if split else None,
        tokens=sizes.tokens,
        pairs=sizes.pairs,
        copies=copies,
        any_copies=any(sizes.redundant),
        lent=torch.tensor(lent, dtype=torch.int64, device=row.device),
        token_sent=group(traveller // weights.shape[1], len(weights)),
        top_k=weights.shape[1],
        num_arriving=arriving,
        pair_sent=pair_sent,
        pair_row=row,
        row_source=group(source, arriving + 1),
    )


@dataclass
class _Sizes:
    tokens: Splits
    pairs: Splits
    num_own: int
    num_rows: int
    redundant: list[list[int]]


def _read_sizes(layout: Layout, tokens: TokenMap, pg: dist.ProcessGroup) -> _Sizes:
    """Everything the host must know, in one read of the device."""
    num_ranks, rank = pg.size(), pg.rank()
    to = torch.where(tokens.rank < 0, num_ranks, tokens.rank)
    pairs = to.new_zeros(num_ranks + 1).index_add_(0, to, torch.ones_like(to))[:-1]
    going = to.new_zeros(num_ranks + 1).index_add_(0, to, tokens.travels.long())[:-1]
    coming = torch.empty_like(going)
    dist.all_to_all_single(coming, going, group=pg)
    rows = layout.sizes[rank].view(2, -1).sum(1)
    tables = [going, coming, pairs, layout.received(rank), rows, layout.redundant.view(-1)]
    values = torch.cat(tables).tolist()
    lists = [values[i * num_ranks : (i + 1) * num_ranks] for i in range(4)]
    own, borrowed, *flat = values[4 * num_ranks :]
    slots = [flat[i : i + layout.block] for i in range(0, len(flat), layout.block)]
    redundant = [[e for e in row if e >= 0] for row in slots]
    return _Sizes(Splits(*lists[:2]), Splits(*lists[2:]), own, own + borrowed, redundant)


def _by_rank(rank: Tensor, keep: Tensor, num: int) -> Tensor:
    """The `num` indices where `keep`, by rank; `num` is known, so that no size is read here."""
    return torch.where(keep, rank, torch.iinfo(torch.int64).max).argsort(stable=True)[:num]


def _lending(redundant: list[list[int]], block: int, rank: int) -> tuple[Splits, list[int]]:
    lent = [[e % block for e in row if e // block == rank] for row in redundant]
    homes = [e // block for e in redundant[rank]]
    borrowed = [homes.count(r) for r in range(len(redundant))]
    return Splits([len(row) for row in lent], borrowed), [e for row in lent for e in row]


def _starts(sizes: list[int]) -> list[int]:
    return [0, *accumulate(sizes[:-1])]


def _spread(values: list[int], sizes: list[int], device: torch.device) -> Tensor:
    """Each value as often as its size says."""
    pair = torch.tensor([values, sizes], device=device)
    return pair[0].repeat_interleave(pair[1], output_size=sum(sizes))


def _count_within(sizes: list[int], device: torch.device) -> Tensor:
    """0, 1, .. of each size."""
    return torch.arange(sum(sizes), device=device) - _spread(_starts(sizes), sizes, device)
