"""Stable LatentMoE (K3 report §2.3): router, Quantile Balancing, SiTU-GLU and grouped experts."""

from openk3.ops.moe.balance import count_margins, exact_bias, histogram_bias, max_violation
from openk3.ops.moe.entrance import LatentRouting, latent_route
from openk3.ops.moe.expert_linear import grouped_linear
from openk3.ops.moe.experts import (
    Permutation,
    combine,
    expert_mlp,
    grouped_mlp,
    permute,
    sort_by_expert,
)
from openk3.ops.moe.router import Routing, route
from openk3.ops.moe.situ import situ_glu

__all__ = [
    "LatentRouting",
    "Permutation",
    "Routing",
    "combine",
    "count_margins",
    "exact_bias",
    "expert_mlp",
    "grouped_linear",
    "grouped_mlp",
    "histogram_bias",
    "latent_route",
    "max_violation",
    "permute",
    "route",
    "situ_glu",
    "sort_by_expert",
]
