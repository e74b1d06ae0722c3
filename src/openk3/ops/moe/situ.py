"""SiTU-GLU, K3's capped gated activation (K3 report eq. 12, app. B)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.errors import InputError
from openk3.ops.backends import triton_or_reference
from openk3.ops.checks import check_kind
from openk3.ops.triton_support import row_kernel_runs


def _triton() -> Any:
    from openk3.ops.moe.triton_situ import situ_triton

    return situ_triton


BACKENDS = triton_or_reference("situ", row_kernel_runs, _triton, lambda: situ_reference)


def situ_glu(
    gate: Tensor,
    up: Tensor,
    beta1: float = 4.0,
    beta2: float | None = 25.0,
    *,
    backend: str | None = None,
) -> Tensor:
    """beta1 tanh(gate / beta1) sigmoid(gate) * beta2 tanh(up / beta2), in float32, cast back once.

    gate, up [..., n] of one dtype. beta2 None leaves `up` uncapped. |result| <= beta1 beta2.
    Raises InputError, BackendError.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or not gate.ndim:
        raise InputError(
            f"gate {list(gate.shape)} {gate.dtype} and up {list(up.shape)} {up.dtype} must be "
            "[..., n] and alike"
        )
    check_kind("gate and up", gate)
    if beta1 <= 0 or (beta2 is not None and beta2 <= 0):
        raise InputError(f"beta1 {beta1} and beta2 {beta2} must be positive (beta2 may be None)")
    facts = {"device": gate.device, "dtype": gate.dtype, "dim": gate.shape[-1]}
    return BACKENDS.resolve(backend, **facts).load()(gate, up, beta1, beta2)


def situ_reference(gate: Tensor, up: Tensor, beta1: float, beta2: float | None) -> Tensor:
    """Plain torch."""
    if gate.dtype in (torch.float32, torch.float64):
        return _Situ.apply(gate, up, beta1, beta2)
    return _Situ.apply(gate.float(), up.float(), beta1, beta2).to(gate.dtype)


class _Situ(torch.autograd.Function):
    """By hand: the three nonlinearities are kept, since tanh is expensive on CPUs."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, beta1: float, beta2: float | None) -> Tensor:
        t, s = torch.tanh(gate / beta1), torch.sigmoid(gate)
        u = up if beta2 is None else torch.tanh(up / beta2)
        ctx.save_for_backward(t, s, u)
        ctx.betas = beta1, beta2
        return (t * s).mul_(u).mul_(beta1 if beta2 is None else beta1 * beta2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        t, s, u = ctx.saved_tensors
        beta1, beta2 = ctx.betas
        activated = (t * s).mul_(beta1)
        # d activated / d gate = (1 - t^2) s + activated (1 - s)
        slope = (
            torch.addcmul(s, s * t, t, value=-1).add_(activated).addcmul_(activated, s, value=-1)
        )
        if beta2 is None:
            return slope.mul_(u).mul_(grad), activated.mul_(grad), None, None
        d_up = torch.addcmul(grad, grad * u, u, value=-1).mul_(activated)
        return slope.mul_(u).mul_(grad).mul_(beta2), d_up, None, None
