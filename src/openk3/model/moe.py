"""Stable LatentMoE, the layer (K3 report §2.3), and the bookkeeping of Quantile Balancing.

Legend: T tokens, d model width, L latent width, E experts, F expert inner width, k experts a token.
"""

import torch
from torch import Tensor, nn

from openk3.config import ModelConfig
from openk3.model.layers import RMSNorm, SituMLP, linear
from openk3.model.ports import Context, ExpertWeights, LocalDispatcher, TokenDispatcher
from openk3.model.streams import beside
from openk3.ops import moe
from openk3.ops.moe.balance import NUM_BINS


class Router(nn.Module):
    """Sigmoid scores, a choice by biased score, and the counts that set the next bias.

    Counts are taken in training mode, once per real token: not for padding, not in evaluation and
    not when activation checkpointing runs a forward pass again during backward.
    """

    e_score_correction_bias: Tensor
    margin_counts: Tensor
    load: Tensor

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.top_k, self.scaling = config.num_experts_per_token, config.routed_scaling_factor
        num = config.num_experts
        self.weight = nn.Parameter(torch.empty(num, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(num))
        counts = torch.zeros(num, NUM_BINS, dtype=torch.int32)
        self.register_buffer("margin_counts", counts, persistent=False)
        self.register_buffer("load", torch.zeros(num, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, down: Tensor, valid: Tensor | None) -> moe.LatentRouting:
        """x [T, d] and the latent projection down [L, d]: routing, and the latent beside it."""
        count = self.training and not _in_backward()
        routing = moe.latent_route(
            x, self.weight, down, self.e_score_correction_bias, self.top_k, self.scaling,
            counts=self.margin_counts if count else None, valid=valid,
        )  # fmt: skip
        if count:
            self._add_load(routing.ids, valid)
        return routing

    @torch.no_grad()
    def _add_load(self, ids: Tensor, valid: Tensor | None) -> None:
        real = torch.ones_like(ids) if valid is None else valid[:, None].expand_as(ids).to(ids)
        self.load.scatter_add_(0, ids.reshape(-1), real.reshape(-1))

    @torch.no_grad()
    def update_bias(self) -> None:
        """Set the bias for the next step from the counts and forget them (eq. 14, app. D)."""
        bias = self.e_score_correction_bias
        bias.copy_(moe.histogram_bias(self.margin_counts, bias, self.top_k))
        self.margin_counts.zero_()
        self.load.zero_()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Experts(nn.Module):
    """Routed experts resident as three stacked tensors."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        num, inner = config.num_experts, config.moe_intermediate_size
        latent = config.routed_expert_hidden_size
        self.num_experts = num
        self.w1 = nn.Parameter(torch.empty(num, inner, latent))  # gate
        self.w3 = nn.Parameter(torch.empty(num, inner, latent))  # up
        self.w2 = nn.Parameter(torch.empty(num, latent, inner))  # down
        self.betas = config.activation_situ_beta, config.activation_situ_linear_beta

    def sorted_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        return moe.grouped_mlp(rows, offsets, self.w1, self.w3, self.w2, *self.betas)

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe.expert_mlp(x, ids, weights, self.w1, self.w3, self.w2, *self.betas)


class LatentMoE(nn.Module):
    """x [B,T,d] -> up(RMSNorm(sum_j p_j E_j(down x))) + shared(x)   (eq. 11)."""

    experts: ExpertWeights

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        dim, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config, layer)
        self.routed_expert_down_proj = linear(dim, latent)
        self.experts = Experts(config)
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps)
        self.routed_expert_up_proj = linear(latent, dim)
        self.shared_experts = None
        if config.num_shared_experts:
            inner = config.num_shared_experts * config.moe_intermediate_size
            betas = config.activation_situ_beta, config.activation_situ_linear_beta
            self.shared_experts = SituMLP(dim, inner, *betas)
        self.dispatcher: TokenDispatcher = LocalDispatcher()
        self.overlap = False
        """Shared experts on a side stream, beside the routed ones. Off: on an H200 two products
        that each fill the chip take 4 % longer together than in turn (benchmarks/layer.py)."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        flat = x.flatten(0, -2)
        with beside(flat, self.overlap) as side:
            shared = None if self.shared_experts is None else self.shared_experts(flat)
        valid = None if ctx.valid is None else ctx.valid.flatten()
        routing = self.gate(flat, self.routed_expert_down_proj.weight, valid)
        ids = routing.ids
        if valid is not None and self.dispatcher.skips_padding:
            ids = ids.masked_fill(~valid[:, None], -1)
        mixed = self.dispatcher(routing.latent, ids, routing.weights, self.experts)
        normed = self.routed_expert_norm(mixed)
        if shared is None:
            return self.routed_expert_up_proj(normed).view_as(x)
        up = self.routed_expert_up_proj.weight
        return side.join(shared).addmm_(normed, up.T).view_as(x)
