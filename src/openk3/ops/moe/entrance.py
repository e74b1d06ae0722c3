"""The entrance of a Stable LatentMoE layer: router and latent down-projection of the same tokens.

Legend: T tokens, D model width, E experts, L latent width, k experts a token.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from openk3.errors import InputError
from openk3.ops.backends import triton_or_reference
from openk3.ops.checks import check_tensor
from openk3.ops.moe.balance import NUM_BINS, count_margins
from openk3.ops.moe.router import check_router, route_reference, router_kernel_runs


class LatentRouting(NamedTuple):
    """Where tokens go, and what they bring along."""

    latent: Tensor
    """[T, L], x down^T."""
    ids: Tensor
    """[T, k] int64, distinct experts of each token, best biased score first."""
    weights: Tensor
    """[T, k] float32, summing to the scaling factor; differentiable."""
    cutoff: Tensor
    """[T] float32, the (k+1)-th biased score (eq. 14's alpha)."""


def _triton() -> Any:
    from openk3.ops.moe.triton_entrance import latent_route_triton

    return latent_route_triton


BACKENDS = triton_or_reference(
    "latent_route", router_kernel_runs, _triton, lambda: latent_route_reference
)


def latent_route(
    x: Tensor, router: Tensor, down: Tensor, bias: Tensor, top_k: int, scaling: float = 1.0, *,
    counts: Tensor | None = None, valid: Tensor | None = None, backend: str | None = None,
) -> LatentRouting:  # fmt: skip
    """Route x and project it down (K3 report eq. 11, 13); gradients to x and both weights.

    x [T, D], router [E, D], down [L, D]; bias [E] float32 takes part in the choice only. counts
    [E, 1000] int32: the Quantile Balancing histogram of the step so far, increased in place by
    exactly this call's tokens; pass None when a forward pass is repeated or not trained on. valid
    [T] bool marks real tokens for it. Raises InputError, BackendError.
    """
    check_router(x, router, bias, top_k)
    check_tensor("down", down, (down.shape[0], x.shape[1]), x.device)
    if valid is not None:
        check_tensor("valid", valid, x.shape[:1], x.device, kind="bool")
    if counts is not None:
        check_tensor("counts", counts, (router.shape[0], NUM_BINS), x.device, kind="integer")
        if counts.dtype != torch.int32 or not counts.is_contiguous():
            raise InputError(f"counts must be int32 and contiguous, not {counts.dtype}")
    dtype = torch.promote_types(torch.promote_types(x.dtype, router.dtype), down.dtype)
    facts = {"device": x.device, "dtype": dtype, "num_experts": router.shape[0]}
    implementation = BACKENDS.resolve(backend, **facts).load()
    return implementation(x, router, down, bias, top_k, scaling, counts, valid)


def latent_route_reference(
    x: Tensor, router: Tensor, down: Tensor, bias: Tensor, top_k: int, scaling: float,
    counts: Tensor | None, valid: Tensor | None,
) -> LatentRouting:  # fmt: skip
    """Plain torch."""
    routing = route_reference(x, router, bias, top_k, scaling)
    if counts is not None:
        with torch.no_grad():
            counts += count_margins(routing.scores, routing.cutoff, bias, valid)
    return LatentRouting(F.linear(x, down), routing.ids, routing.weights, routing.cutoff)
