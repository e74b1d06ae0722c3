"""MoonEP's moves by `torch.distributed` collectives: gloo on CPUs, NCCL on GPUs.

A collective wants its split sizes on the host, so a layer reads one small table of integers, once.
Tokens arrive in the order of their senders; one gather spreads them into the rows' order, which
also makes the copies of a token whose experts met here.

Legend: T tokens, L latent width, N rows here, W = 3 F L values of an expert, B = E / R.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from openk3.ops.triton_support import has_triton
from openk3.parallel.alltoall import exchange
from openk3.parallel.moonep.collective_route import CollectiveRoute, open_route
from openk3.parallel.moonep.slots import Slots
from openk3.parallel.moonep.sums import add_up
from openk3.parallel.moonep.token_map import Layout, TokenMap
from openk3.parallel.moonep.transport import Bytes, Pending, Then


class Collectives:
    """A `Transport` over one process group. Bytes counted are exact, without any padding."""

    def __init__(self, group: dist.ProcessGroup, align: int | None = None) -> None:
        """align: 1 for products that split the rows on the host, 64 for tiled ones; by default
        tiled on GPUs."""
        self.group, self.rank, self.num_ranks = group, group.rank(), group.size()
        self.sent, self.slots = Bytes(), Slots()
        on_gpu = "nccl" in dist.get_backend(group) and has_triton()
        self.align = align or (64 if on_gpu else 1)

    def share_counts(self, load: Tensor) -> Tensor:
        self.sent.tables += load.nbytes * (self.num_ranks - 1)
        everyone = load.new_empty(self.num_ranks, load.numel())
        dist.all_gather(list(everyone.unbind(0)), load, group=self.group)
        return everyone

    def open(self, layout: Layout, tokens: TokenMap, weights: Tensor) -> CollectiveRoute:
        route = open_route(layout, tokens, weights, self.group, split=self.align == 1)
        self.sent.tables += 8 * (self.num_ranks - 1) + 12 * self._elsewhere(route.pairs.sent)
        return route

    def scatter(self, route: CollectiveRoute, x: Tensor, room: int = 0) -> Tensor:
        splits = route.tokens
        self.sent.tokens += self._elsewhere(splits.sent) * x.shape[1] * x.itemsize
        arrived = x.new_empty(route.num_arriving + 1, x.shape[1])
        arrived[-1] = 0  # of padding rows
        exchange(
            x[route.token_sent.target], splits.received, splits.sent, self.group, out=arrived[:-1]
        )
        return arrived[route.row_source.target]

    def gather(self, route: CollectiveRoute, rows: Tensor) -> Tensor:
        splits = route.tokens
        self.sent.tokens += self._elsewhere(splits.received) * rows.shape[1] * rows.itemsize
        partial = add_up(rows, route.row_source)[:-1]
        back = exchange(partial, splits.sent, splits.received, self.group)
        return add_up(back, route.token_sent)

    def gather_values(self, route: CollectiveRoute, values: Tensor) -> Tensor:
        splits = route.pairs
        self.sent.tables += self._elsewhere(splits.received) * values.itemsize
        back = exchange(values[route.pair_row], splits.sent, splits.received, self.group)
        found = values.new_zeros(route.token_sent.num_targets, route.top_k)
        found.view(-1)[route.pair_sent] = back
        return found

    def fetch_experts(
        self, route: CollectiveRoute, own: list[Tensor]
    ) -> tuple[list[Tensor], Pending]:
        splits = route.copies
        self.sent.experts += self._elsewhere(splits.sent) * _width(own) * own[0].itemsize
        flat = torch.cat([w.detach()[route.lent].flatten(1) for w in own], 1)
        num = sum(splits.received)
        landing = self.slots.take("landing", num, flat.shape[1], flat.dtype, flat.device)
        copies = self._banks("weights", route, own, flat.dtype)
        work = self._start(route, landing, flat, splits.received, splits.sent)

        def place() -> None:
            work.wait()
            for copy, part in zip(copies, _unpack(landing, own), strict=True):
                copy.copy_(part)

        return copies, Then(place)

    def grad_room(self, route: CollectiveRoute, own: list[Tensor]) -> list[Tensor]:
        return self._banks("grads", route, own, torch.float32)

    def return_grads(self, route: CollectiveRoute, own: list[Tensor]) -> Pending:
        splits = route.copies
        self.sent.grads += self._elsewhere(splits.received) * _width(own) * 4
        staged = torch.cat([grad.flatten(1) for grad in self.grad_room(route, own)], 1)
        back = staged.new_empty(len(route.lent), staged.shape[1])
        work = self._start(route, back, staged, splits.sent, splits.received)

        def add() -> None:
            work.wait()
            # rank by rank, so that the order of addition is fixed; a rank borrows an expert once
            pieces = zip(back.split(splits.sent), route.lent.split(splits.sent), strict=True)
            for flat, experts in pieces:
                for total, grad in zip(own, _unpack(flat, own), strict=True):
                    total.index_add_(0, experts, grad)

        return Then(add)

    def _banks(
        self, use: str, route: CollectiveRoute, own: list[Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        """Three tensors [copies, ..], each of contiguous experts."""
        num, device = sum(route.copies.received), own[0].device
        return [
            self.slots.take(f"{use} {i}", num, w[0].numel(), dtype, device).view(num, *w.shape[1:])
            for i, w in enumerate(own)
        ]

    def _start(
        self, route: CollectiveRoute, out: Tensor, rows: Tensor, received: list[int],
        sent: list[int],
    ) -> Pending:  # fmt: skip
        if not route.any_copies:
            return Then()
        work = dist.all_to_all_single(out, rows, received, sent, group=self.group, async_op=True)
        assert work is not None, "an asynchronous collective returns its work"
        return work

    def _elsewhere(self, splits: list[int]) -> int:
        return sum(splits) - splits[self.rank]


def _width(own: list[Tensor]) -> int:
    """Values of one expert."""
    return sum(w[0].numel() for w in own)


def _unpack(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """flat [n, W] -> views of n experts, shaped as those of `like` [B, ..]."""
    parts = flat.split([w[0].numel() for w in like], 1)
    return [part.unflatten(1, w.shape[1:]) for part, w in zip(parts, like, strict=True)]
