"""Expert parallelism in its plain form: every copy of a token travels to its expert's home rank.

The baseline that `parallel.moonep` is compared with: rows, FLOPs and bytes of a rank grow with the
popularity of its experts, and each layer reads its split sizes on the host.

Legend: T tokens, k choices, P = T k pairs, R ranks, E experts, L latent width.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from openk3.model.ports import ExpertWeights
from openk3.parallel.experts import experts_per_rank


class AllToAllDispatcher:
    """A `TokenDispatcher` for experts of which this rank holds [rank E/R, (rank + 1) E/R).

    Every rank of the group calls it equally often, forward and backward, with any number of
    tokens. An id of -1 marks padding: it is sent nowhere and adds nothing. Results and gradients
    are those of one device that holds all tokens; an expert's gradient is the sum over all ranks.
    """

    skips_padding = True

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        """Raises ConfigError unless `num_experts` divides by the size of `group`."""
        self.group, self.num_ranks = group, group.size()
        self.block = experts_per_rank(num_experts, self.num_ranks)
        self.rows = 0
        """Rows this rank computed in the last forward pass."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        """x [T, L], ids and weights [T, k], experts: this rank's E / R -> [T, L]."""
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        load = torch.bincount(flat[flat >= 0], minlength=self.block * self.num_ranks)
        arriving = torch.empty_like(load)
        dist.all_to_all_single(arriving, load, group=self.group)
        sent = load.view(self.num_ranks, -1).sum(1).tolist()
        received = arriving.view(self.num_ranks, -1).sum(1).tolist()
        self.rows = sum(received)
        order = order[flat.numel() - sum(sent) :]  # padding sorts first

        rows = _Exchange.apply(x[order // ids.shape[1]], received, sent, self.group)
        expert = torch.arange(self.block, device=ids.device).repeat(self.num_ranks)
        by_expert = expert.repeat_interleave(arriving).argsort(stable=True)
        offsets = arriving.view(self.num_ranks, -1).sum(0).cumsum(0).to(torch.int32)
        y = experts.sorted_rows(rows[by_expert], offsets)
        back = torch.empty_like(y).index_copy(0, by_expert, y)
        back = _Exchange.apply(back, sent, received, self.group)

        pairs = back.new_zeros(flat.numel(), x.shape[1]).index_copy(0, order, back)
        pairs = pairs.view(*ids.shape, x.shape[1]).to(weights.dtype)
        return torch.einsum("tkl,tk->tl", pairs, weights).to(x.dtype)


class _Exchange(torch.autograd.Function):
    """Rows [n, L] grouped by receiver -> rows grouped by sender; the gradient travels back."""

    @staticmethod
    def forward(
        ctx, rows: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.splits, ctx.group = (received, sent), group
        return exchange(rows, received, sent, group)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        received, sent = ctx.splits
        return exchange(grads[0], sent, received, ctx.group), None, None, None


def exchange(
    rows: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """rows [sum(sent), ...] by receiving rank -> [sum(received), ...] by sending rank, in `out`."""
    out = rows.new_empty(sum(received), *rows.shape[1:]) if out is None else out
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out
