"""RMSNorm in both cast orders, and the L2 norm of KDA's queries and keys."""

from typing import Any

from torch import Tensor

from openk3.ops.backends import Backend, BackendTable, always
from openk3.ops.norm.reference import (
    gated_head_norm,
    l2_norm,
    rms_norm_reference,
    rms_norm_wide,
)
from openk3.ops.triton_support import row_kernel_runs

__all__ = ["BACKENDS", "gated_head_norm", "l2_norm", "rms_norm", "rms_norm_wide"]


def _reference() -> Any:
    return rms_norm_reference


def _triton() -> Any:
    from openk3.ops.norm.triton_norm import rms_norm_triton

    return rms_norm_triton


BACKENDS = BackendTable(
    "norm",
    [
        Backend("triton", "an NVIDIA GPU and the triton package", row_kernel_runs, _triton),
        Backend("reference", "nothing", always, _reference),
    ],
)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: str | None = None) -> Tensor:
    """The text model's RMSNorm: normalise in float32, cast back, then multiply by `weight`.

    x [..., d] any float dtype, weight [d]; returns x's shape and dtype. Raises BackendError.
    """
    chosen = BACKENDS.resolve(backend, device=x.device, dtype=x.dtype, dim=x.shape[-1])
    return chosen.load()(x, weight, eps)
