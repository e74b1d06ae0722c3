"""What every Triton backend asks first, and the few facts of the device its launches need."""

import importlib.util
from collections.abc import Hashable
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


def row_kernel_runs(
    *, device: torch.device, dtype: torch.dtype, dim: int, **_: Any
) -> tuple[bool, str]:
    """(usable, reason) of the kernels that hold whole rows of width `dim`."""
    if dtype == torch.float64 or dim % 64:
        return False, f"the kernel takes 16- or 32-bit floats of width 64 n, not {dtype} of {dim}"
    return triton_runs(device)


@cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors; 2 on a CPU, where kernels run in Triton's interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


_COMPILED: dict[Hashable, Any] = {}
MOST_COMPILED = 10_000


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, key: Hashable | None = None, **meta: Any
) -> None:
    """kernel[grid](*args, **meta); with a `key` later calls skip Triton's argument analysis.

    The key must fix everything a compiled kernel depends on: dtypes, constants, which arguments are
    None, and whether integers are 1 or multiples of 16; pointers are checked here. A third of a
    millisecond of host time is what this saves on a kernel of twenty tensors.
    """
    tensors = _flat_tensors((*args, *meta.values()))
    on_gpu = bool(tensors) and tensors[0].is_cuda
    if key is None or not on_gpu or any(t.data_ptr() % 16 for t in tensors):
        kernel[grid](*args, **meta)
        return
    key = (key, tensors[0].device.index)
    compiled = _COMPILED.get(key)
    if compiled is None:
        if len(_COMPILED) >= MOST_COMPILED:  # packed rows of ever new lengths
            _COMPILED.clear()
        _COMPILED[key] = kernel[grid](*args, **meta)
        return
    constants = [meta[name] for name in kernel.arg_names[len(args) :]]
    compiled[(*grid, 1, 1)[:3]](*args, *constants)


def launch_named(kernel: Any, grid: tuple[int, ...], **meta: Any) -> None:
    """launch with every argument named; the key is their dtypes, and their values if no tensors."""
    traits = (x.dtype if isinstance(x, torch.Tensor) else x for x in meta.values())
    launch(kernel, grid, key=(kernel, *meta, *traits), **meta)


def _flat_tensors(args: tuple[Any, ...]) -> list[torch.Tensor]:
    flat: list[torch.Tensor] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            flat.append(arg)
        elif isinstance(arg, tuple):
            flat.extend(x for x in arg if isinstance(x, torch.Tensor))
    return flat
