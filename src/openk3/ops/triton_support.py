"""What every Triton backend asks first, and the few facts of the device its launches need."""

import importlib.util
from functools import cache
from typing import Any

import torch


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def triton_runs(device: torch.device, **_: Any) -> tuple[bool, str]:
    """(usable, reason): Triton is importable and the tensors are on an NVIDIA GPU."""
    if device.type != "cuda":
        return False, f"Triton kernels need a CUDA device; the tensors are on {device.type}"
    if not has_triton():
        return False, "the triton package is not installed (pip install 'openk3[kernels]')"
    return True, f"Triton on {torch.cuda.get_device_name(device)}"


@cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors; 2 on a CPU, where kernels run in Triton's interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """kernel[grid](*args, **meta)."""
    kernel[grid](*args, **meta)
