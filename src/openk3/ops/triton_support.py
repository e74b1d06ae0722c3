"""What every Triton backend asks first, and the few facts of the device its launches need."""

import dis
import importlib.util
from collections.abc import Hashable
from functools import cache
from typing import Any

import torch

from openk3.errors import BackendError


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@cache
def has_gluon() -> bool:
    """Whether Triton has Gluon, its lower-level language."""
    return has_triton() and importlib.util.find_spec("triton.experimental.gluon") is not None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) of other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


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


def power_of_two(n: int, least: int = 1) -> int:
    """The least power of two that is at least n and `least`, itself one: lengths of vectors."""
    return max(least, 1 << (n - 1).bit_length())


@cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors; 2 on a CPU, where kernels run in Triton's interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


_COMPILED: dict[Hashable, Any] = {}
MOST_COMPILED = 10_000


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """kernel[grid](*args, **meta), without Triton's own argument analysis after the first time.

    What a compiled kernel depends on is looked up by dtypes, alignment, whether integers are 1 or
    multiples of 16, and all of `meta`, which holds constants. Saves up to a third of a millisecond
    of host time on a kernel of twenty tensors. Tensor descriptors take the ordinary way.
    """
    facts = _facts(args)
    if facts is None:
        _refuse_host_tensors(kernel, args)
        settle_key(kernel)
        kernel[grid](*args, **meta)
        return
    key = (id(kernel), facts, tuple(meta.items()))
    compiled = _COMPILED.get(key)
    if compiled is None:
        settle_key(kernel)
        _remember(key, kernel[grid](*args, **meta))
        return
    constants = [meta[name] for name in kernel.arg_names[len(args) :]]
    compiled[(*grid, 1, 1)[:3]](*args, *constants)


def launch_named(kernel: Any, grid: tuple[int, ...], **meta: Any) -> None:
    """`launch` with every argument named; numbers outside tuples are looked up by their value."""
    loose = {name: x for name, x in meta.items() if isinstance(x, torch.Tensor | tuple)}
    facts = _facts(tuple(loose.values()))
    if facts is None or not any(isinstance(x, torch.Tensor) for x in loose.values()):
        _refuse_host_tensors(kernel, tuple(loose.values()))
        kernel[grid](**meta)
        return
    others = tuple((name, x) for name, x in meta.items() if name not in loose)
    key = (id(kernel), facts, tuple(loose), others)
    compiled = _COMPILED.get(key)
    if compiled is None:
        settle_key(kernel)
        _remember(key, kernel[grid](**meta))
        return
    compiled[(*grid, 1, 1)[:3]](*(meta[name] for name in kernel.arg_names))


def _refuse_host_tensors(kernel: Any, args: tuple[Any, ...]) -> None:
    """Raises BackendError where a compiled kernel would meet a tensor that is not on a GPU."""
    if not hasattr(type(kernel), "cache_key"):  # the interpreter runs it
        return
    for x in args:
        if isinstance(x, torch.Tensor) and not x.is_cuda:
            raise BackendError(f"Triton kernels need a CUDA device; a tensor is on {x.device}")


def settle_key(function: Any) -> None:
    """Computes the key under which Triton keeps a kernel on disk, those of its callees first.

    A key covers the globals of callees whose own keys are known, and misses those of the others.
    Left alone, it would depend on what the process launched before, and kernels that another one
    has compiled would be compiled again: seconds for each.
    """
    if getattr(function, "hash", "") is not None:  # known; or a function that the interpreter runs
        return
    for step in dis.get_instructions(function.fn):
        callee = function.fn.__globals__.get(step.argval) if step.opname == "LOAD_GLOBAL" else None
        if hasattr(type(callee), "cache_key"):  # asking the callee itself would compute it
            settle_key(callee)
    _ = function.cache_key


def _remember(key: Hashable, compiled: Any) -> None:
    if len(_COMPILED) >= MOST_COMPILED:  # packed rows of ever new lengths
        _COMPILED.clear()
    _COMPILED[key] = compiled


def _facts(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What Triton specialises a kernel on; None if it runs elsewhere than on one GPU's tensors."""
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if not arg.is_cuda:
                return None
            found.append((arg.dtype, arg.device.index, arg.data_ptr() % 16 == 0))
        elif arg is None or isinstance(arg, bool):
            found.append(arg)
        elif isinstance(arg, int):
            found.append(1 if arg == 1 else (arg % 16 == 0, -(1 << 31) <= arg < 1 << 31))
        elif isinstance(arg, float):
            found.append(float)
        elif isinstance(arg, tuple):
            inner = _facts(arg)
            if inner is None:
                return None
            found.append(inner)
        else:
            return None
    return tuple(found)
