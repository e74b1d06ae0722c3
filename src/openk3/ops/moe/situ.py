"""SiTU-GLU, K3's capped gated activation (K3 report eq. 12, app. B)."""

import torch
from torch import Tensor


def situ_glu(gate: Tensor, up: Tensor, beta1: float = 4.0, beta2: float | None = 25.0) -> Tensor:
    """beta1 tanh(gate / beta1) sigmoid(gate) * beta2 tanh(up / beta2), in float32, cast back once.

    gate, up [..., n] of one dtype. beta2 None leaves `up` uncapped. |result| <= beta1 beta2.
    """
    if gate.dtype in (torch.float32, torch.float64):
        return _Situ.apply(gate, up, beta1, beta2)
    return _Situ.apply(gate.float(), up.float(), beta1, beta2).to(gate.dtype)


class _Situ(torch.autograd.Function):
    """By hand, so that only gate and up are kept for the backward pass."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, beta1: float, beta2: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = beta1, beta2
        capped = up if beta2 is None else torch.tanh(up / beta2).mul_(beta2)
        return torch.tanh(gate / beta1).mul_(beta1).mul_(torch.sigmoid(gate)).mul_(capped)

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        beta1, beta2 = ctx.betas
        t, s = torch.tanh(gate / beta1), torch.sigmoid(gate)
        activated = beta1 * t * s
        d_activated = (1 - t * t) * s + activated * (1 - s)
        if beta2 is None:
            return grad * up * d_activated, grad * activated, None, None
        u = torch.tanh(up / beta2)
        return grad * (beta2 * u) * d_activated, grad * activated * (1 - u * u), None, None
