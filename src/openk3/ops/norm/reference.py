"""Norms in plain torch."""

import torch
from torch import Tensor

from openk3.ops.precision import wide_dtype


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The text model's RMSNorm: normalise in float32, cast back, then multiply by `weight`.

    x [..., d] any float dtype, weight [d]; returns x's shape and dtype.
    """
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).to(x.dtype)


def rms_norm_wide(x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    """The vision tower's RMSNorm (torch's own): multiply by `weight` before the cast back.

    x [..., d], weight [d]; eps None is the dtype's machine epsilon, as in the published tower.
    """
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dim (eps inside the root, on the sum)."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)


def gated_head_norm(o: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """RMSNorm per head times sigmoid(gate), all in float32, cast once (K3 report eq. 6).

    o [..., H, V], weight [V] float32, gate [..., H, V] logits; returns o's shape in gate's dtype.
    """
    wide = wide_dtype(o)
    x = o.to(wide)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.to(wide)
    return (normed * torch.sigmoid(gate.to(wide))).to(gate.dtype)
