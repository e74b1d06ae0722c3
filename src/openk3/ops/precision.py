"""The one rule for the precision of intermediate results."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype that references compute in: float64 for a float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def outside_autocast(device: torch.device) -> AbstractContextManager:
    """Where `torch.autocast` does not round the operands of products that are meant to be wide."""
    if device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
