"""Kimi Delta Attention, the layer (K3 report §2.1.1).

Legend: B batch, T tokens, H heads, K = V head width, D = H * K.
"""

import torch
from torch import Tensor, nn

from openk3.config import ModelConfig
from openk3.model.layers import RMSNorm, linear
from openk3.model.ports import Context, KdaInputs, KdaWeights


class ShortConv(nn.Module):
    """Taps of a depthwise convolution, float32 [D, 1, W]; the last is the current token's."""

    def __init__(self, dim: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, 1, taps))


class KimiDeltaAttention(nn.Module):
    """x [B,T,d] -> [B,T,d] through a per-head matrix state with channel-wise decay."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        linear_attn = config.linear_attn
        self.layer = layer
        self.heads, self.width = linear_attn.num_heads, linear_attn.head_dim
        self.lower_bound = linear_attn.gate_lower_bound
        dim, inner = config.hidden_size, config.kda_dim
        self.q_proj, self.k_proj, self.v_proj = (linear(dim, inner) for _ in range(3))
        taps = linear_attn.short_conv_kernel_size
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(inner, taps) for _ in range(3))
        self.f_a_proj, self.f_b_proj = linear(dim, self.width), linear(self.width, inner)
        self.b_proj = linear(dim, self.heads)
        self.g_proj = linear(dim, inner)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.o_norm = RMSNorm(self.width, config.rms_norm_eps)
        self.o_proj = linear(inner, dim)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        g = self._heads(self.f_b_proj(self.f_a_proj(x)))
        if ctx.probe is not None:
            ctx.probe.decayed(self.layer, g.detach(), self.A_log.detach(), self.dt_bias.detach())
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        inputs = KdaInputs(q, k, v, g, self.b_proj(x), self._heads(self.g_proj(x)))
        return self.o_proj(ctx.sequence.kda(inputs, self.weights(), ctx.state).flatten(2))

    def weights(self) -> KdaWeights:
        """What lies between the projections in and out."""
        convs = (self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)
        gate = (self.A_log, self.dt_bias, self.lower_bound)
        return KdaWeights(self.layer, convs, *gate, self.o_norm.weight, self.o_norm.eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.width))
