"""Block AttnRes mixing in plain torch (K3 report §2.2, eq. 8-10), float32 inside."""

from collections.abc import Sequence

import torch
from torch import Tensor

from openk3.errors import InputError
from openk3.ops.checks import check_kind, check_tensor
from openk3.ops.precision import outside_autocast, wide_dtype


def check_sources(sources: Sequence[Tensor]) -> Tensor:
    """The first of 1 to 16 sources of one shape, dtype and device. Raises InputError."""
    if not 1 <= len(sources) <= 16:
        raise InputError(f"AttnRes takes 1 to 16 sources, not {len(sources)}")
    first = sources[0]
    if first.ndim == 0:
        raise InputError("sources must be [..., d], not numbers")
    check_kind("sources", first)
    for v in sources[1:]:
        if v.dtype != first.dtype:
            raise InputError(f"sources must have one dtype, not {v.dtype} beside {first.dtype}")
        check_tensor("sources", v, first.shape, first.device)
    return first


def mix_reference(
    sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Softmax over depth: (mixed [..., d] in the sources' dtype, weights [..., S] float32)."""
    wide = wide_dtype(sources[0])
    direction = query.reshape(-1).to(wide) * norm_weight.to(wide)
    with outside_autocast(direction.device):
        scores = torch.stack([depth_score(v.to(wide), direction, eps) for v in sources], -1)
    weights = scores.softmax(-1)
    mixed = sources[0].to(wide) * weights[..., 0, None]
    for i in range(1, len(sources)):
        mixed = torch.addcmul(mixed, sources[i].to(wide), weights[..., i, None])
    return mixed.to(sources[0].dtype), weights


def depth_score(v: Tensor, direction: Tensor, eps: float) -> Tensor:
    """RMS-normed key times query, without forming the key. v [..., d], direction [d] -> [...]."""
    return (v @ direction) * torch.rsqrt(v.pow(2).mean(-1) + eps)
