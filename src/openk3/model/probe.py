"""What a forward pass looks like inside: AttnRes weights and KDA decays, for reports."""

import torch
from torch import Tensor

from openk3.ops.kda.reference import log_decay


class Summary:
    """A Probe that keeps small summaries: pass it to `K3.hidden(..., probe=...)`."""

    def __init__(self, lower_bound: float, num_bins: int = 50) -> None:
        self.lower_bound = lower_bound
        self.attn_res: dict[str, list[float]] = {}
        """Mean weight of each source, by sublayer (`layers.3.attn`, `layers.3.ffn`, `output`)."""
        self.edges = torch.linspace(lower_bound, 0.0, num_bins + 1)
        """Edges of the log-decay histogram."""
        self.decay: dict[int, list[int]] = {}
        """Counts of the log-decays of a KDA layer's channels, by layer index."""

    def mixed(self, name: str, weights: Tensor) -> None:
        self.attn_res[name] = weights.flatten(0, -2).mean(0).tolist()

    def decayed(self, layer: int, g: Tensor, A_log: Tensor, dt_bias: Tensor) -> None:
        decay = log_decay(g.float(), A_log, dt_bias, self.lower_bound)
        counts = torch.histc(decay.cpu(), self.edges.numel() - 1, self.lower_bound, 0.0)
        self.decay[layer] = counts.long().tolist()
