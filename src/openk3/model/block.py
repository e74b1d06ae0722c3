"""One decoder layer: attention and FFN, each fed by a Block AttnRes mix (K3 report §2.2).

There is no residual stream. A token carries a bank of finished block sums and the running sum of
the current block; before each sublayer a learned query mixes them.
"""

from torch import Tensor, nn

from openk3.config import ModelConfig
from openk3.model.kda import KimiDeltaAttention
from openk3.model.layers import RMSNorm, SituMLP, linear
from openk3.model.mla import GatedMLA
from openk3.model.moe import LatentMoE
from openk3.model.ports import Context
from openk3.ops.attn_res import mix, mix_norm


def attn_res(
    bank: list[Tensor], running: Tensor, norm: RMSNorm, proj: nn.Linear, ctx: Context, where: str
) -> Tensor:
    """softmax over [bank..., running], each [B,T,d], by the learned query in `proj` (eq. 8-10)."""
    sources = [*bank, running]
    mixed = mix(sources, proj.weight, norm.weight, norm.eps, return_weights=ctx.probe is not None)
    if isinstance(mixed, Tensor):
        return mixed
    mixed, weights = mixed
    if ctx.probe is not None:
        ctx.probe.mixed(where, weights.detach())
    return mixed


def attn_res_norm(
    bank: list[Tensor], running: Tensor, norm: RMSNorm, proj: nn.Linear, out: RMSNorm, ctx: Context,
    where: str,
) -> Tensor:  # fmt: skip
    """`out` of the mix: what a sublayer reads, in one pass over memory unless a probe watches."""
    if ctx.probe is not None:
        return out(attn_res(bank, running, norm, proj, ctx, where))
    sources = [*bank, running]
    return mix_norm(sources, proj.weight, norm.weight, norm.eps, out.weight, out.eps)


class K3Layer(nn.Module):
    """Layer `index` (0-based) of the trunk."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.starts_block = index % config.attn_res_block_size == 0
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.self_attention_res_norm = RMSNorm(dim, eps)
        self.self_attention_res_proj = linear(dim, 1)
        self.input_layernorm = RMSNorm(dim, eps)
        mixer = KimiDeltaAttention if config.is_kda(index) else GatedMLA
        self.self_attn = mixer(config, index)
        self.mlp_res_norm = RMSNorm(dim, eps)
        self.mlp_res_proj = linear(dim, 1)
        self.post_attention_layernorm = RMSNorm(dim, eps)
        if config.is_moe(index):
            self.block_sparse_moe = LatentMoE(config, index)
        else:
            betas = config.activation_situ_beta, config.activation_situ_linear_beta
            self.mlp = SituMLP(dim, config.intermediate_size, *betas)

    def forward(
        self, bank: list[Tensor], running: Tensor, ctx: Context
    ) -> tuple[list[Tensor], Tensor]:
        """bank: finished block sums, running: the current block's sum, each [B,T,d]."""
        where = f"layers.{self.index}"
        norm, proj, out = (
            self.self_attention_res_norm, self.self_attention_res_proj, self.input_layernorm
        )  # fmt: skip
        h = (
            attn_res_norm(bank, running, norm, proj, out, ctx, f"{where}.attn")
            if bank
            else out(running)
        )
        a = self.self_attn(h, ctx)
        if self.starts_block:
            bank, running = [*bank, running], a
        else:
            running = running + a
        norm, proj, out = self.mlp_res_norm, self.mlp_res_proj, self.post_attention_layernorm
        h = attn_res_norm(bank, running, norm, proj, out, ctx, f"{where}.ffn")
        return bank, running + self.ffn(h, ctx)

    def ffn(self, x: Tensor, ctx: Context) -> Tensor:
        """What the layer does to its second mix [B,T,d]: a dense MLP or experts."""
        if hasattr(self, "mlp"):
            return self.mlp(x)
        return self.block_sparse_moe(x, ctx)
