"""Numbers between host and device, without a host that waits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(
    values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """A tensor of host numbers; the host does not wait until a GPU has it."""
    pinned = device.type == "cuda"
    made = torch.tensor(values, dtype=dtype, pin_memory=pinned)
    return made.to(device, non_blocking=True) if pinned else made


def to_host(x: Tensor) -> Tensor:
    """A copy on the host, which a GPU's is only once an event behind it has come."""
    return x.to("cpu", non_blocking=True) if x.is_cuda else x
