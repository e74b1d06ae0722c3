"""RMSNorm in both cast orders, and the L2 norm of KDA's queries and keys."""

from typing import Any

from torch import Tensor

from openk3.ops.backends import triton_or_reference
from openk3.ops.checks import check_kind, check_tensor
from openk3.ops.norm.reference import (
    gated_head_norm,
    l2_norm,
    rms_norm_reference,
    rms_norm_wide,
)
from openk3.ops.triton_support import row_kernel_runs

__all__ = ["BACKENDS", "gated_head_norm", "l2_norm", "rms_norm", "rms_norm_wide"]


def _triton() -> Any:
    from openk3.ops.norm.triton_norm import rms_norm_triton

    return rms_norm_triton


BACKENDS = triton_or_reference("norm", row_kernel_runs, _triton, lambda: rms_norm_reference)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: str | None = None) -> Tensor:
    """The text model's RMSNorm: normalise in float32, cast back, then multiply by `weight`.

    x [..., d] any float dtype, weight [d]; returns x's shape and dtype. Raises InputError,
    BackendError.
    """
    check_kind("x", x)
    check_tensor("weight", weight, x.shape[-1:], x.device)
    chosen = BACKENDS.resolve(backend, device=x.device, dtype=x.dtype, dim=x.shape[-1])
    return chosen.load()(x, weight, eps)
