"""How much memory a process's device uses and has, and how fast it could compute."""

import torch

from openk3.obs import env

PEAK_BFLOAT16 = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bfloat16 FLOP/s of a GPU whose name holds the key (vendors' data sheets)."""


def memory_bytes(device: torch.device) -> int | None:
    """Peak use: allocated GPU memory, or the process's resident set; None where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return env.peak_memory()


def memory_total(device: torch.device) -> int | None:
    """Bytes of the GPU's memory, or of the machine's; None where unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return env.total_memory()


def peak_flops(device: torch.device) -> float | None:
    """bfloat16 FLOP/s of a known GPU, else None."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_BFLOAT16.items() if key in name), None)
