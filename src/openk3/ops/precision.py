"""The one rule for the precision of intermediate results."""

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype that references compute in: float64 for a float64 input, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
