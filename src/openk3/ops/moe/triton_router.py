"""The router through Triton kernels: the choice of experts, its gradient and its histogram.

Ties go to the lower expert id, in every pass. Legend: T tokens, D model width, E experts, k experts
a token.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.moe import router_kernels as kernels
from openk3.ops.moe.balance import NUM_BINS
from openk3.ops.moe.router import Routing
from openk3.ops.triton_support import launch, power_of_two


def router_logits(x: Tensor, router: Tensor) -> Tensor:
    """x [T, D], router [E, D] -> [T, E] float32."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch.mm(x, router.T, out_dtype=torch.float32)
    return x.float() @ router.float().T


def choose(
    logits: Tensor, bias: Tensor, top_k: int, scaling: float,
    counts: Tensor | None = None, valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """logits [T, E] float32 -> (ids, weights, cutoff, chosen scores [T, k]).

    counts [E, 1000] int32 grows by the margins of the tokens with valid [T] true (all if None).
    """
    tokens, num_experts = logits.shape
    ids = logits.new_empty(tokens, top_k, dtype=torch.int64)
    weights, chosen = logits.new_empty(tokens, top_k), logits.new_empty(tokens, top_k)
    cutoff = logits.new_empty(tokens)
    block = 4
    if tokens:
        launch(
            kernels.choose_experts, (-(-tokens // block),), logits, bias.contiguous(),
            _packed(valid), ids, weights,
            cutoff, chosen, counts, tokens, scaling,
            E=num_experts, E_PAD=power_of_two(num_experts, 2), TOP_K=top_k,
            K_PAD=power_of_two(top_k, 2), BT=block, BINS=NUM_BINS, COUNT=counts is not None,
            MASKED=valid is not None, num_warps=4,
        )  # fmt: skip
    return ids, weights, cutoff, chosen


def choose_gradient(
    d_weights: Tensor, ids: Tensor, chosen: Tensor, like: Tensor, num_experts: int, scaling: float
) -> Tensor:
    """d_weights [T, k] -> d_logits [T, E] in `like`'s dtype, zero at experts not chosen."""
    tokens, top_k = ids.shape
    d_logits = like.new_empty(tokens, num_experts)
    if tokens:
        launch(
            kernels.choose_backward, (tokens,), d_weights.contiguous(), ids, chosen, d_logits,
            tokens, scaling, E=num_experts, E_PAD=power_of_two(num_experts, 2), TOP_K=top_k,
            num_warps=1,
        )  # fmt: skip
    return d_logits


def count_margins_triton(
    scores: Tensor, cutoff: Tensor, bias: Tensor, valid: Tensor | None = None
) -> Tensor:
    """`count_margins` without a host decision."""
    tokens, num_experts = scores.shape
    counts = scores.new_zeros(num_experts, NUM_BINS, dtype=torch.int64)
    if tokens:
        launch(
            kernels.count_scores, (-(-tokens // 4),), scores.float().contiguous(),
            cutoff.float().contiguous(), bias.float().contiguous(), _packed(valid), counts,
            tokens, E=num_experts, E_PAD=power_of_two(num_experts, 2), BT=4,
            BINS=NUM_BINS, MASKED=valid is not None, num_warps=4,
        )  # fmt: skip
    return counts


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, router: Tensor, bias: Tensor, top_k: int, scaling: float):
        logits = router_logits(x, router)
        ids, weights, cutoff, chosen = choose(logits, bias, top_k, scaling)
        scores = torch.sigmoid(logits)
        ctx.save_for_backward(x, router, ids, chosen)
        ctx.scaling = scaling
        ctx.mark_non_differentiable(ids, scores, cutoff)
        return ids, weights, scores, cutoff

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        x, router, ids, chosen = ctx.saved_tensors
        d_logits = choose_gradient(grads[1], ids, chosen, x, router.shape[0], ctx.scaling)
        return d_logits @ router, d_logits.T @ x, None, None, None


def route_triton(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scaling_factor: float
) -> Routing:
    """`route`, whose `scores` carry no gradient here."""
    return Routing(*_Route.apply(x.contiguous(), weight, bias.float(), top_k, scaling_factor))


def _packed(valid: Tensor | None) -> Tensor | None:
    return None if valid is None else valid.contiguous()
