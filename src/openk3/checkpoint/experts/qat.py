"""Quantisation-aware training: routed experts multiply as they will be served.

Weights pass through MXFP4 (scale rule even) and the inputs of each product through MXFP8 (rceil);
masters stay in high precision and receive the gradient unchanged (K3 report §4, QAT). Everything
else of the model stays as it is.
"""

from typing import Any

from torch import Tensor, nn

from openk3.model import K3
from openk3.model.ports import routed_by_sorting
from openk3.ops import moe, mx


class QatExperts(nn.Module):
    """The resident experts' own parameters, seen through the formats."""

    def __init__(self, experts: Any, *, activations: bool = True) -> None:
        """experts: the resident module whose w1, w3 and w2 [E, out, in] are shared, not copied."""
        super().__init__()
        self.num_experts, self.betas = experts.num_experts, experts.betas
        self.w1, self.w3, self.w2 = experts.w1, experts.w3, experts.w2
        self.activations = activations

    def sorted_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """rows [R, L] grouped by expert, offsets [E] (end of each group) -> [R, L]."""
        rows = self._input(rows)
        gate = moe.grouped_linear(rows, mx.fake_quantize(self.w1), offsets)
        up = moe.grouped_linear(rows, mx.fake_quantize(self.w3), offsets)
        inner = self._input(moe.situ_glu(gate, up, *self.betas))
        return moe.grouped_linear(inner, mx.fake_quantize(self.w2), offsets)

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, L], ids and weights [T, k] -> the weighted sum of each token's experts [T, L]."""
        return routed_by_sorting(self, x, ids, weights)

    def _input(self, x: Tensor) -> Tensor:
        return mx.fake_quantize(x, "mxfp8") if self.activations else x


def fake_quantise_experts(model: K3, *, activations: bool = True) -> K3:
    """Put QatExperts in place of every layer's resident experts; names and parameters stay.

    activations=False quantises weights only, as the published checkpoint declares itself.
    """
    for layer in model.layers:
        if hasattr(layer, "block_sparse_moe"):
            block = layer.block_sparse_moe
            block.experts = QatExperts(block.experts, activations=activations)
    return model
