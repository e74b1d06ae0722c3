"""Float64 helpers for kernel tests."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """||got - wanted|| / ||wanted||; a NaN anywhere is an infinite error."""
    got, wanted = got.detach().double(), wanted.detach().double()
    if not bool(got.isfinite().all()):
        return float("inf")
    scale = wanted.norm().clamp(min=1e-30)
    return float((got - wanted).norm() / scale)


def gradients(function: Any, inputs: Sequence[Tensor], d_out: Tensor) -> list[Tensor]:
    """[output, gradients of every input] of function(*inputs) at fresh leaves."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


def poison(device: str, megabytes: int = 8) -> None:
    """Leave freed blocks full of NaN behind, for torch.empty to hand out again."""
    blocks = [torch.full((1 << 17,), float("nan"), device=device) for _ in range(megabytes * 2)]
    del blocks
