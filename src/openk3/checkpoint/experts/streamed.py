"""Routed experts read from disk when a token visits them, through one cache for all layers.

While a layer works, the next MoE layer's router is asked, on the hidden state that entered this
layer, which experts it will want; those reads start early. The prediction only moves reads
forward: what is computed depends on the real routing alone.

Legend: T tokens, L latent width, F inner width, E experts, k experts a token.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from openk3.checkpoint.experts.cache import CacheStats, ExpertCache
from openk3.checkpoint.experts.packed import Matrices, expert_by_expert
from openk3.checkpoint.hf.folder import Stack, Survey
from openk3.checkpoint.hf.header import Entry
from openk3.checkpoint.hf.layout import EXPERT_MATRICES
from openk3.checkpoint.hf.read import DTYPES, FileReader
from openk3.checkpoint.hf.source import FolderSource
from openk3.config import ModelConfig
from openk3.errors import InputError
from openk3.model import K3
from openk3.model.ports import routed_by_sorting
from openk3.ops import moe, mx

Segment = tuple[Entry, int, int]
"""A tensor's entry, the byte in it where one expert begins, and the expert's number of bytes."""


class ExpertFiles:
    """Where each expert's bytes lie, and how they fill one buffer."""

    def __init__(self, found: Survey, reader: FileReader) -> None:
        self._reader, self._stacks = reader, found.stacks
        self._shapes = {}
        for name, stack in found.stacks.items():
            if stack.parameter.is_expert:
                self._shapes[name] = stack.parameter.shape[1:]
        self.slot_bytes = max(
            sum(size for *_, size in self._segments(layer, 0)) for layer in self.layers()
        )

    def layers(self) -> list[int]:
        """Indices of the MoE layers."""
        return sorted({int(name.split(".")[1]) for name in self._shapes})

    def fill(self, key: Any, buffer: Tensor) -> None:
        """Read expert key = (layer, expert) into uint8 `buffer`."""
        done = 0
        for entry, start, size in self._segments(*key):
            self._reader.read_bytes(entry, entry.offset + start, buffer[done : done + size])
            done += size

    def matrices(self, layer: int, expert: int, buffer: Tensor, dtype: torch.dtype) -> Matrices:
        """w1, w3, w2 of a filled buffer, in `dtype`; never a view of it."""
        sizes = [size for *_, size in self._segments(layer, expert)]
        pieces = list(buffer[: sum(sizes)].split(sizes))
        matrices = []
        for matrix in EXPERT_MATRICES:
            stack = self._stack(layer, matrix)
            rows, columns = stack.parameter.shape[1:]
            if stack.packed:
                packed, scale = pieces.pop(0).view(rows, -1), pieces.pop(0).view(rows, -1)
                matrices.append(mx.dequantize(packed, scale, dtype=dtype))
            else:
                value = pieces.pop(0).view(DTYPES[stack.stored_dtype])
                matrices.append(value.view(rows, columns).to(dtype, copy=True))
        return matrices[0], matrices[1], matrices[2]

    def _segments(self, layer: int, expert: int) -> list[Segment]:
        segments = []
        for matrix in EXPERT_MATRICES:
            stack = self._stack(layer, matrix)
            for entries in stack.pieces.values():
                if len(entries) > 1:
                    segments.append((entries[expert], 0, entries[expert].num_bytes))
                else:
                    size = entries[0].num_bytes // stack.parameter.shape[0]
                    segments.append((entries[0], expert * size, size))
        return segments

    def _stack(self, layer: int, matrix: str) -> Stack:
        return self._stacks[f"layers.{layer}.block_sparse_moe.experts.{matrix}"]


class StreamedExperts(nn.Module):
    """One layer's experts, on disk; for inference."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        files: ExpertFiles,
        cache: ExpertCache,
        source: FolderSource,
    ) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.betas = config.activation_situ_beta, config.activation_situ_linear_beta
        self.layer, self.files, self.cache, self.source = layer, files, cache, source
        self.mxfp8_inputs = False
        self.predict_next: Callable[[], Sequence[Hashable]] = tuple

    def sorted_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """rows [R, L] grouped by expert, offsets [E] (end of each group) -> [R, L]."""
        if torch.is_grad_enabled() and rows.requires_grad:
            raise InputError("streamed experts cannot be trained; load with experts='dequant'")
        counts = offsets.diff(prepend=offsets.new_zeros(1))
        keys = [(self.layer, expert) for expert in counts.nonzero()[:, 0].tolist()]
        place = {key: number for number, key in enumerate(keys)}
        ahead = 2 * self.cache.workers
        self.cache.ahead(keys[:ahead])
        self.cache.ahead(self.predict_next(), keep=keys, predicted=True)

        def matrices(expert: int) -> Matrices:
            key = (self.layer, expert)
            self.cache.ahead(keys[place[key] : place[key] + ahead])
            with self.cache.use(key) as buffer:
                return self.files.matrices(*key, buffer.to(rows.device), rows.dtype)

        return expert_by_expert(rows, offsets, matrices, self.betas, self.mxfp8_inputs)

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, L], ids and weights [T, k] -> the weighted sum of each token's experts [T, L]."""
        return routed_by_sorting(self, x, ids, weights)


def attach(model: K3, found: Survey, reader: FileReader, cache_bytes: float) -> ExpertCache:
    """Give every MoE layer of `model` streamed experts that share one cache of `cache_bytes`."""
    files, source = ExpertFiles(found, reader), FolderSource(found, reader)
    cache = ExpertCache(files.fill, files.slot_bytes, int(cache_bytes // files.slot_bytes))
    blocks = {layer: model.layers[layer].block_sparse_moe for layer in files.layers()}
    for layer, block in blocks.items():
        block.experts = StreamedExperts(model.config, layer, files, cache, source)
    for layer, following in pairwise(blocks):
        Predictor(blocks[layer], blocks[following], following, cache.num_slots // 2)
    return cache


class Predictor:
    """Guesses the experts of the following MoE layer from what enters this one."""

    def __init__(self, block: Any, following: Any, layer: int, limit: int) -> None:
        self._gate, self._layer, self._limit = following.gate, layer, limit
        self._hidden: Tensor | None = None
        block.register_forward_pre_hook(self._remember)
        block.experts.predict_next = self._predict

    def _remember(self, module: nn.Module, inputs: tuple) -> None:
        self._hidden = inputs[0].flatten(0, -2)

    @torch.no_grad()
    def _predict(self) -> list[Hashable]:
        """Keys by falling number of tokens that would choose them."""
        if self._hidden is None:
            return []
        gate, hidden, self._hidden = self._gate, self._hidden, None
        bias = gate.e_score_correction_bias
        ids = moe.route(hidden, gate.weight, bias, gate.top_k, gate.scaling).ids
        votes = torch.bincount(ids.reshape(-1), minlength=bias.numel())
        count = min(self._limit, int((votes > 0).sum()))
        return [(self._layer, expert) for expert in votes.topk(count).indices.tolist()]


def stream_stats(model: K3) -> CacheStats | None:
    """Counts of the cache of a model loaded with experts='stream'; else None."""
    for module in model.modules():
        if isinstance(module, StreamedExperts):
            return module.cache.stats
    return None
