"""Quantisation-aware training: routed experts multiply as they will be served.

Weights pass through MXFP4 (scale rule even) and the inputs of each product through MXFP8 (rceil);
masters stay in high precision and receive the gradient unchanged (K3 report §4, QAT). Everything
else of the model stays as it is. Serving with `quantise_expert_inputs` gives the same bits.
"""

from typing import Any

from torch import Tensor, nn

from openk3.checkpoint.experts.packed import PackedExperts
from openk3.checkpoint.experts.streamed import StreamedExperts
from openk3.errors import InputError
from openk3.model import K3
from openk3.model.ports import routed_by_sorting
from openk3.ops import moe, mx


class QatExperts(nn.Module):
    """The resident experts' own parameters, seen through the formats."""

    def __init__(self, experts: Any, *, mxfp8_inputs: bool = True) -> None:
        """experts: the resident module whose w1, w3 and w2 [E, out, in] are shared, not copied."""
        super().__init__()
        self.num_experts, self.betas = experts.num_experts, experts.betas
        self.w1, self.w3, self.w2 = experts.w1, experts.w3, experts.w2
        self.mxfp8_inputs = mxfp8_inputs

    def sorted_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """rows [R, L] grouped by expert, offsets [E] (end of each group) -> [R, L]."""
        w1, w3, w2 = (mx.fake_quantize(weight) for weight in (self.w1, self.w3, self.w2))
        return moe.grouped_mlp(
            rows, offsets, w1, w3, w2, *self.betas, mxfp8_inputs=self.mxfp8_inputs
        )

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, L], ids and weights [T, k] -> the weighted sum of each token's experts [T, L]."""
        return routed_by_sorting(self, x, ids, weights)


def fake_quantise_experts(model: K3, *, mxfp8_inputs: bool = True) -> K3:
    """Put QatExperts in place of every layer's resident experts; names and parameters stay.

    mxfp8_inputs=False quantises weights only, as the published checkpoint declares itself.
    """
    for layer in model.layers:
        if hasattr(layer, "block_sparse_moe"):
            block = layer.block_sparse_moe
            block.experts = QatExperts(block.experts, mxfp8_inputs=mxfp8_inputs)
    return model


def quantise_expert_inputs(model: K3, on: bool = True) -> K3:
    """Serve as QAT trains: pass the inputs of packed or streamed experts through MXFP8.

    Raises InputError where a layer's experts are ordinary weights.
    """
    for layer in model.layers:
        if hasattr(layer, "block_sparse_moe"):
            experts = layer.block_sparse_moe.experts
            if not isinstance(experts, PackedExperts | StreamedExperts | QatExperts):
                raise InputError(
                    f"the experts of layer {layer.index} are not quantised; load the model with "
                    "experts='packed' or 'stream', or call fake_quantise_experts"
                )
            experts.mxfp8_inputs = on
    return model
