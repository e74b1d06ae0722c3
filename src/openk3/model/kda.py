"""Kimi Delta Attention, the layer (K3 report §2.1.1).

Legend: B batch, T tokens, H heads, K = V head width, D = H * K.
"""

import torch
from torch import Tensor, nn

from openk3.config import ModelConfig
from openk3.model.layers import RMSNorm, linear
from openk3.model.ports import Context, KdaState
from openk3.ops.norm import gated_head_norm


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
        old = None if ctx.state is None else ctx.state.kda(self.layer)
        conv = ctx.sequence.conv
        q, conv_q = conv(self.q_proj(x), self.q_conv1d.weight, old and old.conv_q)
        k, conv_k = conv(self.k_proj(x), self.k_conv1d.weight, old and old.conv_k)
        v, conv_v = conv(self.v_proj(x), self.v_conv1d.weight, old and old.conv_v)
        g = self._heads(self.f_b_proj(self.f_a_proj(x)))
        if ctx.probe is not None:
            ctx.probe.decayed(self.layer, g.detach(), self.A_log.detach(), self.dt_bias.detach())
        o, S = ctx.sequence.kda(
            self._heads(q),
            self._heads(k),
            self._heads(v),
            g,
            self.b_proj(x),
            state=old and old.S,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=self.lower_bound,
        )
        if ctx.state is not None:
            ctx.state.set_kda(self.layer, KdaState(conv_q, conv_k, conv_v, S))
        gate = self._heads(self.g_proj(x))
        return self.o_proj(gated_head_norm(o, self.o_norm.weight, gate, self.o_norm.eps).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.width))
