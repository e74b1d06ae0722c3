"""Checks of tensor arguments that the public ops share. Every failure is an InputError by name."""

import torch
from torch import Tensor

from openk3.errors import InputError


def check_tensor(
    name: str, x: object, shape: tuple[int, ...], device: torch.device, *, kind: str = "floating"
) -> None:
    """x must be a tensor of this shape on `device`, of "floating" point, "integer" or "bool"."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.shape != shape:
        raise InputError(f"{name} must be {list(shape)}, not {list(x.shape)}")
    check_kind(name, x, kind)
    if x.device != device:
        raise InputError(f"{name} is on {x.device}; the other tensors are on {device}")


def check_kind(name: str, x: Tensor, kind: str = "floating") -> None:
    """x must be of "floating" point, "integer" or "bool"."""
    if kind == "floating":
        good, wanted = x.is_floating_point(), "floating point"
    elif kind == "integer":
        good = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        wanted = "integers"
    else:
        good, wanted = x.dtype == torch.bool, "bool"
    if not good:
        raise InputError(f"{name} must be of {wanted}, not {x.dtype}")


def readable(x: Tensor) -> bool:
    """Whether to look at values costs nothing: they are on the host, no graph is compiled, and x is
    no stand-in for a tensor."""
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_range(name: str, x: Tensor, low: int, high: int) -> None:
    """Integers x must lie in [low, high). On a GPU they are trusted, not read."""
    if not readable(x) or not x.numel():
        return
    least, most = x.aminmax()
    if int(least) < low or int(most) >= high:
        worst = int(least) if int(least) < low else int(most)
        raise InputError(f"{name} must lie in [{low}, {high}); one is {worst}")
