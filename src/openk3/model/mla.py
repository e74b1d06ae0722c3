"""Gated MLA, the layer (K3 report §2.1.2): latent keys and values, no positions, an output gate.

Legend: B batch, T tokens, H heads, R latent width, V value width.
"""

import torch
from torch import Tensor, nn

from openk3.config import ModelConfig
from openk3.model.layers import RMSNorm, linear
from openk3.model.ports import Context

LATENT_NORM_EPS = 1e-6  # the published norms of the two latents keep their class default


class GatedMLA(nn.Module):
    """x [B,T,d] -> [B,T,d] by causal softmax attention over a latent cache."""

    max_logits: Tensor

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.key_width = config.num_attention_heads, config.qk_head_dim
        self.latent, self.rope = config.kv_lora_rank, config.qk_rope_head_dim
        dim, out = config.hidden_size, self.heads * config.v_head_dim
        self.q_a_proj = linear(dim, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
        self.q_b_proj = linear(config.q_lora_rank, self.heads * self.key_width)
        self.kv_a_proj_with_mqa = linear(dim, self.latent + self.rope)
        self.kv_a_layernorm = RMSNorm(self.latent, LATENT_NORM_EPS)
        per_head = config.qk_nope_head_dim + config.v_head_dim
        self.kv_b_proj = linear(self.latent, self.heads * per_head)
        self.g_proj = linear(dim, out)
        self.o_proj = linear(out, dim)
        self.register_buffer("max_logits", torch.full((self.heads,), -torch.inf), persistent=False)
        self.track_max_logits = False

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        latent, k_rope = self.latents(x)
        track = self.track_max_logits and self.training
        o = ctx.sequence.attend(
            self.layer,
            q.unflatten(-1, (self.heads, self.key_width)),
            latent,
            k_rope,
            self.kv_b_proj.weight,
            ctx.state,
            return_max_logits=track,
        )
        if track:
            o, peak = o
            self.max_logits = torch.maximum(self.max_logits, peak)
        return self.o_proj(o.flatten(2) * torch.sigmoid(self.g_proj(x)))

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What is remembered of x [B,T,d]: latents [B,T,R] and rope parts [B,T,rope]."""
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.latent, self.rope], -1)
        return self.kv_a_layernorm(latent), k_rope
