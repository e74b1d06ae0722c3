"""Weight clipping for Gated MLA, introduced with Kimi K2 and kept by K3 (K3 report §3).

After an update, each head whose largest attention logit of that step exceeded tau has its query
and key rows scaled down so that the logit would have been tau: gamma = min(1, tau / S_max),
per-head query and key rows times sqrt(gamma), query rows that meet the key part shared by all heads
times gamma (that part itself serves every head and stays). Values stay. KDA needs nothing: its
queries and keys are L2-normalised.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from openk3.config.model import ModelConfig
from openk3.errors import InputError


@torch.no_grad()
def clip_mla_weights(
    weights: Mapping[str, Tensor],
    max_logits: Mapping[int, Tensor],
    config: ModelConfig,
    tau: float,
    rows: Mapping[str, tuple[int, int]] | None = None,
) -> Tensor:
    """Scale heads in place; returns how many heads were scaled, int64 [] on their device.

    weights: float32 masters by parameter name; max_logits: 0-based layer -> [H] largest scaled
    logit of the step over the whole global batch. `rows` names the first row and the row after the
    last that are here of a weight that is sharded. A head never grows; S_max <= 0 changes nothing.
    """
    clipped = []
    for layer, largest_H in max_logits.items():
        if largest_H.shape != (config.num_attention_heads,):
            raise InputError(
                f"max_logits of layer {layer} has shape {tuple(largest_H.shape)}; expected "
                f"({config.num_attention_heads},), one per head"
            )
        # clamp first: tau / S of a negative maximum would be negative, of zero infinite
        gamma_H = tau / largest_H.float().clamp(min=tau)
        for part, factors in zip(("q_b_proj", "kv_b_proj"), _factors(gamma_H, config), strict=True):
            name = _find(weights, layer, part)
            start, stop = (0, len(factors)) if rows is None else rows[name]
            weights[name].mul_(factors[start:stop, None].to(weights[name]))
        clipped.append((gamma_H < 1).sum())
    return torch.stack(clipped).sum() if clipped else torch.zeros((), dtype=torch.int64)


def _factors(gamma_H: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """What each row of q_b and of kv_b is multiplied by."""
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    root_H1, gamma_H1 = gamma_H.sqrt()[:, None], gamma_H[:, None]
    q = torch.cat([root_H1.expand(-1, nope), gamma_H1.expand(-1, rope)], 1)
    kv = torch.cat([root_H1.expand(-1, nope), torch.ones_like(gamma_H1).expand(-1, value)], 1)
    return q.flatten(), kv.flatten()


def _find(weights: Mapping[str, Tensor], layer: int, part: str) -> str:
    suffix = f"layers.{layer}.self_attn.{part}.weight"
    for prefix in ("", "model.", "language_model.model."):
        if prefix + suffix in weights:
            return prefix + suffix
    raise InputError(f"max_logits names layer {layer}, but there is no weight {suffix}")
