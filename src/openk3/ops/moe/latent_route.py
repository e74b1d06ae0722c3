"""The entrance of a Stable LatentMoE layer: router and latent down-projection of the same tokens.

The logits are float32 sums of bfloat16 products. Ties go to the lower expert id, in every pass.
Legend: T tokens, D model width, E experts, L latent width, k experts a token.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from openk3.errors import InputError
from openk3.ops.moe import router_kernels as kernels
from openk3.ops.moe.balance import NUM_BINS
from openk3.ops.moe.grouped import Tile, descriptor
from openk3.ops.moe.triton_router import choose, choose_gradient, router_logits
from openk3.ops.triton_support import launch, num_sms

PROJECT_TILE = Tile(256, 64, 8, 4, flat=False)  # a loop with a branch cannot be flattened


class LatentRouting(NamedTuple):
    """Where tokens go, and what they bring along."""

    latent: Tensor
    """[T, L], x down^T."""
    ids: Tensor
    """[T, k] int64, best biased score first."""
    weights: Tensor
    """[T, k] float32, differentiable."""
    cutoff: Tensor
    """[T] float32, the (k+1)-th biased score."""


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


def latent_route(
    x: Tensor, router: Tensor, down: Tensor, bias: Tensor, top_k: int, scaling: float = 1.0, *,
    counts: Tensor | None = None, valid: Tensor | None = None, fused: bool = False,
) -> LatentRouting:  # fmt: skip
    """Route x and project it down (K3 report eq. 11, 13), gradients to x and both weights.

    x [T, D], router [E, D] and down [L, D] of one dtype, bias [E] float32. counts [E, 1000] int32:
    the Quantile Balancing histogram of the step so far, increased in place exactly by this call's
    tokens; pass None when a forward pass is repeated or not trained on. valid [T] bool marks real
    tokens for it. Raises InputError.
    """
    if router.shape[0] <= top_k or x.shape[1] != router.shape[1] or x.shape[1] != down.shape[1]:
        raise InputError(
            f"x {list(x.shape)}, router {list(router.shape)}, down {list(down.shape)} must be "
            f"[T, D], [E, D], [L, D] with E above top_k = {top_k}"
        )
    if counts is not None and (
        counts.shape != (router.shape[0], NUM_BINS) or counts.dtype != torch.int32
    ):
        raise InputError(
            f"counts {list(counts.shape)} of {counts.dtype} must be int32 "
            f"[{router.shape[0]}, {NUM_BINS}]"
        )
    out: Any = _LatentRoute.apply(
        x.contiguous(), router, down, bias, top_k, scaling, counts, valid, fused
    )
    return LatentRouting(*out)
