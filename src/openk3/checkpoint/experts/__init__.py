"""Routed experts that are not three resident tensors: packed MXFP4, streamed from disk, or
fake-quantised for quantisation-aware training. Each implements `model.ports.ExpertWeights`.
"""

from openk3.checkpoint.experts.cache import CacheStats, ExpertCache
from openk3.checkpoint.experts.packed import PackedExperts
from openk3.checkpoint.experts.qat import (
    QatExperts,
    fake_quantise_experts,
    quantise_expert_inputs,
)
from openk3.checkpoint.experts.streamed import StreamedExperts, stream_stats

__all__ = [
    "CacheStats",
    "ExpertCache",
    "PackedExperts",
    "QatExperts",
    "StreamedExperts",
    "fake_quantise_experts",
    "quantise_expert_inputs",
    "stream_stats",
]
