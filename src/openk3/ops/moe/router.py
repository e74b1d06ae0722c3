"""The sigmoid top-k router (K3 report eq. 11, 13) and the cutoffs Quantile Balancing reads.

Legend: T tokens, E experts, k experts a token visits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from openk3.errors import InputError
from openk3.ops.backends import triton_or_reference
from openk3.ops.checks import check_kind, check_tensor
from openk3.ops.precision import outside_autocast, wide_dtype
from openk3.ops.triton_support import triton_runs


@dataclass(frozen=True)
class Routing:
    """Where tokens go."""

    ids: Tensor
    """[T, k] int64, distinct experts of each token, best biased score first."""
    weights: Tensor
    """[T, k] float32, positive, summing to the scaling factor; differentiable."""
    scores: Tensor
    """[T, E] float32 sigmoid scores, without bias."""
    cutoff: Tensor
    """[T] float32, the (k+1)-th largest biased score (eq. 14's alpha); no gradient."""


def _triton() -> Any:
    from openk3.ops.moe.triton_router import route_triton

    return route_triton


def router_kernel_runs(
    *, device: torch.device, dtype: torch.dtype, num_experts: int, **_: Any
) -> tuple[bool, str]:
    """(usable, reason) of the kernels that choose experts."""
    usable, reason = triton_runs(device)
    if usable and (dtype != torch.bfloat16 or num_experts > 1024):
        usable = False
        reason = f"the kernel takes bfloat16 and up to 1024 experts, not {dtype}, {num_experts}"
    return usable, reason


BACKENDS = triton_or_reference("router", router_kernel_runs, _triton, lambda: route_reference)


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    scaling_factor: float = 1.0,
    *,
    backend: str | None = None,
) -> Routing:
    """Choose experts by score + bias, weigh them by score alone, all in float32.

    x [T, d], weight [E, d], bias [E] float32 (used for the choice only). Raises InputError,
    BackendError.
    """
    num_experts = weight.shape[0]
    check_router(x, weight, bias, top_k)
    dtype = x.dtype if x.dtype == weight.dtype else torch.promote_types(x.dtype, weight.dtype)
    chosen = BACKENDS.resolve(backend, device=x.device, dtype=dtype, num_experts=num_experts)
    return chosen.load()(x, weight, bias, top_k, scaling_factor)


def check_router(x: Tensor, weight: Tensor, bias: Tensor, top_k: int) -> None:
    """Raises InputError unless x [T, d], weight [E, d] and bias [E] fit, and top_k < E."""
    if x.ndim != 2 or weight.ndim != 2:
        raise InputError(f"x {list(x.shape)}, weight {list(weight.shape)} must be [T, d], [E, d]")
    check_kind("x", x)
    check_tensor("weight [E, d]", weight, (weight.shape[0], x.shape[1]), x.device)
    check_tensor("bias [E]", bias, weight.shape[:1], x.device)
    if not 1 <= top_k < weight.shape[0]:
        raise InputError(f"top_k {top_k} must be between 1 and E - 1 = {weight.shape[0] - 1}")


def route_reference(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scaling_factor: float
) -> Routing:
    """Plain torch."""
    wide = wide_dtype(x)
    with outside_autocast(x.device):
        scores = torch.sigmoid(F.linear(x.to(wide), weight.to(wide)))
    with torch.no_grad():
        best = (scores + bias.to(wide)).topk(top_k + 1, dim=-1)
    ids, cutoff = best.indices[:, :top_k], best.values[:, top_k]
    chosen = scores.gather(1, ids)
    weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling_factor
    return Routing(ids, weights, scores, cutoff)
