"""The token dispatcher that gives every rank the same work (K3 report §5.2.1).

Forward: counts -> plan -> token map -> rows to their ranks, redundant experts behind them ->
products -> weighted sums back. Of all this only the dispatch input is kept, beside integer tables
and the rows' router weights. Backward sends the input again beside the gradient, prefetches the
redundant experts again, and returns their gradients, staged in float32, to their homes.

Legend: T tokens, k choices, L latent width, E experts, B = E / R experts of this rank, N rows.
"""

from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.errors import ConfigError, InputError
from openk3.model.moe import Experts
from openk3.model.ports import ExpertWeights
from openk3.ops.triton_support import has_triton
from openk3.parallel.experts import experts_per_rank
from openk3.parallel.moonep import products
from openk3.parallel.moonep.collectives import Collectives
from openk3.parallel.moonep.planner import solve
from openk3.parallel.moonep.token_map import copies_pay, lay_out, map_tokens
from openk3.parallel.moonep.transport import Route, Transport


class MoonEPDispatcher:
    """A `TokenDispatcher` for experts of which this rank holds [rank E/R, (rank + 1) E/R).

    Every rank of the group calls it equally often, forward and backward, with any number of
    tokens; a rank without tokens calls it with x [0, L]. An id of -1 marks padding: it is sent
    nowhere, counts for no balance and adds nothing. Results and gradients are those of one device
    that holds all tokens; an expert's gradient is the sum over all ranks, on its home rank.

    One dispatcher serves all layers of a model: they share its buffers.
    """

    skips_padding = True

    def __init__(
        self, group: dist.ProcessGroup | None, num_experts: int, transport: Transport | None = None
    ) -> None:
        """Moves by collectives of `group` unless `transport` is given.

        Raises ConfigError unless `num_experts` divides by the number of ranks.
        """
        if transport is None:
            if group is None:
                raise ConfigError("a dispatcher needs a process group or a transport")
            transport = Collectives(group)
        self.transport = transport
        self.block = experts_per_rank(num_experts, transport.num_ranks)
        self.num_experts = num_experts
        self.rows = 0
        """Rows of the last forward pass, equal on all ranks but for a remainder of one; where the
        host does not know them, the rows there was room for."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        """x [T, L], ids [T, k] int64, weights [T, k] float32, experts: this rank's B -> [T, L].

        Raises InputError unless `experts` are B stacked parameters.
        """
        if not isinstance(experts, Experts) or experts.num_experts != self.block:
            raise InputError(
                f"this rank computes with {self.block} stacked experts, not with "
                f"{experts.num_experts} of {type(experts).__name__}; see spread_experts"
            )
        route = self.plan_route(ids, weights)
        self.rows = len(route.weights)
        own = experts.w1, experts.w3, experts.w2
        return _Dispatch.apply(x, weights, *own, route, experts.betas, self.transport)

    @torch.no_grad()
    def plan_route(self, ids: Tensor, weights: Tensor) -> Route:
        """Plan ids [T, k] with the other ranks and announce the rows; collective."""
        transport = self.transport
        flat = torch.where(ids < 0, self.num_experts, ids).reshape(-1)
        load = flat.new_zeros(self.num_experts + 1).index_add_(0, flat, torch.ones_like(flat))
        counts = transport.share_counts(load[:-1].contiguous())
        layout = lay_out(counts, allocate(counts), transport.align)
        share = copies_pay(transport.num_ranks, ids.shape[1])
        tokens = map_tokens(ids, layout, transport.rank, share_copies=share)
        return transport.open(layout, tokens, weights)


def allocate(counts: Tensor) -> Tensor:
    """counts [R, E] int64 -> the plan's alloc [R, E] on the same device."""
    if counts.is_cuda and has_triton():
        from openk3.parallel.moonep.planner_gpu import solve_on_device

        return solve_on_device(counts)
    load = counts.sum(0).cpu().numpy()
    return torch.from_numpy(solve(load, len(counts))).to(counts.device)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor,
        route: Route, betas: products.Betas, transport: Transport,
    ):  # fmt: skip
        ctx.save_for_backward(x, w1, w3, w2)
        ctx.route, ctx.betas, ctx.transport = route, betas, transport
        own = [w1, w3, w2]
        rows = transport.scatter(route, x)
        copies, ready = transport.fetch_experts(route, own)
        y = _products(route).forward(rows, route, own, copies, ready, betas)
        return transport.gather(route, y)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        x, *own = ctx.saved_tensors
        route, transport = ctx.route, ctx.transport
        rows, d_out = transport.scatter(route, x), transport.scatter(route, grads[0], room=1)
        copies, ready = transport.fetch_experts(route, own)
        staged = transport.grad_room(route, own)
        found = _products(route).backward(rows, d_out, route, own, copies, ready, staged, ctx.betas)
        home = transport.return_grads(route, found.own)
        dx = transport.gather(route, found.rows)
        d_weights = transport.gather_values(route, found.weights)
        home.wait()
        return dx, d_weights, *found.own, None, None, None


def _products(route: Route) -> ModuleType:
    """The products for rows whose groups the host knows, or does not."""
    if route.num_own is not None:
        return products
    from openk3.parallel.moonep import tiled

    return tiled
