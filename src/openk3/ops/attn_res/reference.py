"""Block AttnRes mixing in plain torch (K3 report §2.2, eq. 8-10), float32 inside."""

from collections.abc import Sequence

import torch
from torch import Tensor

from openk3.ops.precision import wide_dtype


def mix_reference(
    sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Softmax over depth: (mixed [..., d] in the sources' dtype, weights [..., S] float32)."""
    wide = wide_dtype(sources[0])
    direction = query.reshape(-1).to(wide) * norm_weight.to(wide)
    scores = torch.stack([_score(v.to(wide), direction, eps) for v in sources], -1)
    weights = scores.softmax(-1)
    mixed = sources[0].to(wide) * weights[..., 0, None]
    for i in range(1, len(sources)):
        mixed = torch.addcmul(mixed, sources[i].to(wide), weights[..., i, None])
    return mixed.to(sources[0].dtype), weights


def _score(v: Tensor, direction: Tensor, eps: float) -> Tensor:
    """RMS-normed key times query, without forming the key."""
    return (v @ direction) * torch.rsqrt(v.pow(2).mean(-1) + eps)
