"""The entrance of a Stable LatentMoE layer through Triton kernels, and its gradient.

Logits and latent are two library products: x read twice costs 27 us of 0.56 ms, and one kernel of
our own for both took three times as long (benchmarks/results/moe.md). The logits are float32 sums
of bfloat16 products. Ties go to the lower expert id, in every pass.
Legend: T tokens, D model width, E experts, L latent width, k experts a token.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.moe.entrance import LatentRouting
from openk3.ops.moe.triton_router import choose, choose_gradient, router_logits


class _LatentRoute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, router: Tensor, down: Tensor, bias: Tensor, top_k: int, scaling: float,
        counts: Tensor | None, valid: Tensor | None,
    ):  # fmt: skip
        logits, latent = router_logits(x, router), x @ down.T
        ids, weights, cutoff, chosen = choose(logits, bias, top_k, scaling, counts, valid)
        ctx.save_for_backward(x, router, down, ids, chosen)
        ctx.scaling = scaling
        ctx.mark_non_differentiable(ids, cutoff)
        return latent, ids, weights, cutoff

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        x, router, down, ids, chosen = ctx.saved_tensors
        d_latent, _, d_weights, _ = grads
        d_logits = choose_gradient(d_weights, ids, chosen, x, router.shape[0], ctx.scaling)
        dx = torch.addmm(d_latent @ down, d_logits, router)
        return dx, d_logits.T @ x, d_latent.T @ x, *[None] * 5


def latent_route_triton(
    x: Tensor, router: Tensor, down: Tensor, bias: Tensor, top_k: int, scaling: float,
    counts: Tensor | None, valid: Tensor | None,
) -> LatentRouting:  # fmt: skip
    """`latent_route`."""
    out: Any = _LatentRoute.apply(
        x.contiguous(), router, down, bias.float(), top_k, scaling, counts, valid
    )
    return LatentRouting(*out)
