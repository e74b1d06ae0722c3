"""MoonEP's moves by `torch.distributed` collectives: gloo on CPUs, NCCL on GPUs.

A collective wants its split sizes on the host, so a layer reads one small table of integers, once.
Tokens arrive in the order of their senders; one gather spreads them into the rows' order, which
also makes the copies of a token whose experts met here.

Legend: T tokens, L latent width, N rows here, W = 3 F L values of an expert, B = E / R.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from openk3.parallel.alltoall import exchange
from openk3.parallel.moonep.collective_route import CollectiveRoute, open_route
from openk3.parallel.moonep.slots import Slots
from openk3.parallel.moonep.sums import add_up
from openk3.parallel.moonep.token_map import Layout, TokenMap
from openk3.parallel.moonep.transport import Bytes, Pending


class Collectives:
    """A `Transport` over one process group. Bytes counted are exact, without any padding."""

    align = 1

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.num_ranks = group, group.rank(), group.size()
        self.sent, self.slots = Bytes(), Slots()

    def share_counts(self, load: Tensor) -> Tensor:
        self.sent.tables += load.nbytes * (self.num_ranks - 1)
        everyone = load.new_empty(self.num_ranks, load.numel())
        dist.all_gather(list(everyone.unbind(0)), load, group=self.group)
        return everyone

    def open(self, layout: Layout, tokens: TokenMap, weights: Tensor) -> CollectiveRoute:
        route = open_route(layout, tokens, weights, self.group)
        self.sent.tables += 8 * (self.num_ranks - 1) + 12 * self._elsewhere(route.pairs.sent)
        return route

    def scatter(self, route: CollectiveRoute, x: Tensor, room: int = 0) -> Tensor:
        splits = route.tokens
        self.sent.tokens += self._elsewhere(splits.sent) * x.shape[1] * x.itemsize
        rows = x[route.token_sent.target]
        return exchange(rows, splits.received, splits.sent, self.group)[route.row_source.target]

    def gather(self, route: CollectiveRoute, rows: Tensor) -> Tensor:
        splits = route.tokens
        self.sent.tokens += self._elsewhere(splits.received) * rows.shape[1] * rows.itemsize
        partial = add_up(rows, route.row_source)
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
        flat = torch.cat([w.detach()[route.lent].flatten(1) for w in own], 1)
        copies, width = route.copies, flat.shape[1]
        self.sent.experts += self._elsewhere(copies.sent) * width * flat.itemsize
        bank = self.slots.take("weights", sum(copies.received), width, flat.dtype, flat.device)
        ready = self._start(route, bank, flat, copies.received, copies.sent)
        return _unpack(bank, own), ready

    def grad_room(self, route: CollectiveRoute, own: list[Tensor]) -> list[Tensor]:
        return _unpack(self._staged(route, own), own)

    def return_grads(self, route: CollectiveRoute, own: list[Tensor]) -> Pending:
        copies, staged = route.copies, self._staged(route, own)
        self.sent.grads += self._elsewhere(copies.received) * staged.shape[1] * 4
        back = staged.new_empty(len(route.lent), staged.shape[1])
        work = self._start(route, back, staged, copies.sent, copies.received)
        return _Reduction(work, back, route, own)

    def _staged(self, route: CollectiveRoute, own: list[Tensor]) -> Tensor:
        num, width = sum(route.copies.received), sum(w[0].numel() for w in own)
        return self.slots.take("grads", num, width, torch.float32, own[0].device)

    def _start(
        self, route: CollectiveRoute, out: Tensor, rows: Tensor, received: list[int],
        sent: list[int],
    ) -> Pending:  # fmt: skip
        if not route.any_copies:
            return _Done()
        work = dist.all_to_all_single(out, rows, received, sent, group=self.group, async_op=True)
        assert work is not None, "an asynchronous collective returns its work"
        return work

    def _elsewhere(self, splits: list[int]) -> int:
        return sum(splits) - splits[self.rank]


class _Done:
    def wait(self) -> None:
        pass


class _Reduction:
    """Adds returned gradients rank by rank, so that the order of addition is fixed."""

    def __init__(
        self, work: Pending, back: Tensor, route: CollectiveRoute, own: list[Tensor]
    ) -> None:
        self.work, self.back, self.route, self.own = work, back, route, own

    def wait(self) -> None:
        self.work.wait()
        sizes = self.route.copies.sent
        parts = zip(self.back.split(sizes), self.route.lent.split(sizes), strict=True)
        for flat, experts in parts:
            for total, grad in zip(self.own, _unpack(flat, self.own), strict=True):
                total.index_add_(0, experts, grad)  # an expert is lent to a rank once


def _unpack(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """flat [n, W] -> views of n experts, shaped as those of `like` [B, ..]."""
    parts = flat.split([w[0].numel() for w in like], 1)
    return [part.unflatten(1, w.shape[1:]) for part, w in zip(parts, like, strict=True)]
