"""The sigmoid top-k router (K3 report eq. 11, 13) and the cutoffs Quantile Balancing reads.

Legend: T tokens, E experts, k experts a token visits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from openk3.ops.precision import wide_dtype


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


def route(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scaling_factor: float = 1.0
) -> Routing:
    """Choose experts by score + bias, weigh them by score alone, all in float32.

    x [T, d], weight [E, d], bias [E] float32 (used for the choice only).
    """
    wide = wide_dtype(x)
    scores = torch.sigmoid(F.linear(x.to(wide), weight.to(wide)))
    with torch.no_grad():
        best = (scores + bias.to(wide)).topk(top_k + 1, dim=-1)
    ids, cutoff = best.indices[:, :top_k], best.values[:, top_k]
    chosen = scores.gather(1, ids)
    weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling_factor
    return Routing(ids, weights, scores, cutoff)
