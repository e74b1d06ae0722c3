"""Small pieces: norms, the SiTU MLP."""

import torch
from torch import Tensor, nn

from openk3.ops.moe import situ_glu
from openk3.ops.norm import rms_norm


class RMSNorm(nn.Module):
    """The text model's RMSNorm."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def linear(rows_in: int, rows_out: int) -> nn.Linear:
    """There is no bias anywhere in the model."""
    return nn.Linear(rows_in, rows_out, bias=False)


class SituMLP(nn.Module):
    """down(SiTU-GLU(gate(x), up(x))): the dense FFN and the shared experts (K3 report eq. 12)."""

    def __init__(self, dim: int, inner: int, beta1: float, beta2: float | None) -> None:
        super().__init__()
        self.gate_proj = linear(dim, inner)
        self.up_proj = linear(dim, inner)
        self.down_proj = linear(inner, dim)
        self.betas = beta1, beta2

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(situ_glu(self.gate_proj(x), self.up_proj(x), *self.betas))
