"""A multi-token-prediction layer, as an option: from position t it guesses token t + 2.

The published checkpoint has none (num_nextn_predict_layers 0); K3's report grows its draft head
from one (§4). The layer joins the trunk's last hidden state with the embedding of the next token
and is one Gated MLA and one dense SiTU MLP with plain residuals; embedding and head are the model's
own.

Legend: B batch, T tokens, d model width.
"""

import torch
from torch import Tensor, nn

from openk3.config import ModelConfig
from openk3.model.layers import RMSNorm, SituMLP, linear
from openk3.model.mla import GatedMLA
from openk3.model.ports import Context


class MTPLayer(nn.Module):
    """(hidden at t, embedding of token t + 1) -> hidden whose head output predicts token t + 2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.hnorm, self.enorm = RMSNorm(dim, eps), RMSNorm(dim, eps)
        self.eh_proj = linear(2 * dim, dim)
        self.input_layernorm = RMSNorm(dim, eps)
        self.self_attn = GatedMLA(config, config.num_hidden_layers)
        self.post_attention_layernorm = RMSNorm(dim, eps)
        betas = config.activation_situ_beta, config.activation_situ_linear_beta
        self.mlp = SituMLP(dim, config.mtp_intermediate_size, *betas)
        self.norm = RMSNorm(dim, eps)

    def forward(self, hidden: Tensor, next_embedding: Tensor, ctx: Context) -> Tensor:
        """hidden, next_embedding [B,T,d] -> [B,T,d]."""
        x = self._joined(hidden, next_embedding)
        x = x + self.self_attn(self.input_layernorm(x), ctx)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.norm(x)

    def latents(self, hidden: Tensor, next_embedding: Tensor) -> tuple[Tensor, Tensor]:
        """What its attention remembers of the pairs: [B,T,R] and [B,T,rope]."""
        return self.self_attn.latents(self.input_layernorm(self._joined(hidden, next_embedding)))

    def _joined(self, hidden: Tensor, next_embedding: Tensor) -> Tensor:
        return self.eh_proj(torch.cat([self.enorm(next_embedding), self.hnorm(hidden)], -1))


def later_targets(targets: Tensor, ignore: int = -100) -> Tensor:
    """What the layer should predict: targets [..., T] one step on, within their document.

    A target is wanted only where its predecessor was, so the guess never crosses a document's end.
    """
    later = torch.full_like(targets, ignore)
    later[..., :-1] = targets[..., 1:]
    return later.masked_fill(targets == ignore, ignore)
