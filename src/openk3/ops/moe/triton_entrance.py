"""The entrance of a Stable LatentMoE layer through Triton kernels, and its gradient.

The logits are float32 sums of bfloat16 products. Ties go to the lower expert id, in every pass.
Legend: T tokens, D model width, E experts, L latent width, k experts a token.
"""

from typing import Any

import torch
from torch import Tensor

from openk3.ops.moe import router_kernels as kernels
from openk3.ops.moe.entrance import LatentRouting
from openk3.ops.moe.grouped import Tile, descriptor
from openk3.ops.moe.triton_router import choose, choose_gradient, router_logits
from openk3.ops.triton_support import launch, num_sms

PROJECT_TILE = Tile(256, 64, 8, 4, flat=False)  # a loop with a branch cannot be flattened


def project_both(
    x: Tensor, router: Tensor, down: Tensor, *, fused: bool, tile: Tile = PROJECT_TILE
) -> tuple[Tensor, Tensor]:
    """(logits [T, E] float32, latent [T, L]): one kernel, or two library products."""
    if not fused:
        return router_logits(x, router), x @ down.T
    tokens, width = x.shape
    logits = x.new_empty(tokens, router.shape[0], dtype=torch.float32)
    latent = x.new_empty(tokens, down.shape[0])
    launch(
        kernels.project_both, (num_sms(x.device),), descriptor(x, (tile.bm, tile.bk)),
        descriptor(router, (tile.bn, tile.bk)), descriptor(down, (tile.bn, tile.bk)),
        logits, latent, tokens, D=width, E=router.shape[0], L=down.shape[0], BM=tile.bm,
        BN=tile.bn, BK=tile.bk, GROUP=tile.group, FLAT=tile.flat and x.is_cuda,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return logits, latent


class _LatentRoute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, router: Tensor, down: Tensor, bias: Tensor, top_k: int, scaling: float,
        counts: Tensor | None, valid: Tensor | None, fused: bool,
    ):  # fmt: skip
        logits, latent = project_both(x, router, down, fused=fused)
        ids, weights, cutoff, chosen = choose(logits, bias, top_k, scaling, counts, valid)
        ctx.save_for_backward(x, router, down, ids, chosen)
        ctx.scaling = scaling
        ctx.mark_non_differentiable(ids, cutoff)
        return latent, ids, weights, cutoff

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, router, down, ids, chosen = ctx.saved_tensors
        d_latent, _, d_weights, _ = grads
        d_logits = choose_gradient(d_weights, ids, chosen, x, router.shape[0], ctx.scaling)
        dx = torch.addmm(d_latent @ down, d_logits, router)
        return dx, d_logits.T @ x, d_latent.T @ x, *[None] * 6


def latent_route_triton(
    x: Tensor, router: Tensor, down: Tensor, bias: Tensor, top_k: int, scaling: float,
    counts: Tensor | None, valid: Tensor | None, *, fused: bool = False,
) -> LatentRouting:  # fmt: skip
    """`latent_route`; `fused` makes logits and latent in one kernel of our own."""
    out: Any = _LatentRoute.apply(
        x.contiguous(), router, down, bias.float(), top_k, scaling, counts, valid, fused
    )
    return LatentRouting(*out)
