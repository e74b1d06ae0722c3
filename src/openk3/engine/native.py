"""Passes on a CPU as one call: the model recorded as a program of C++ kernels.

What CUDA graphs are to a GPU (`graphs`): the same operations over the same memory, without Python
between them. A decoding step reads each weight once and spends next to nothing beside.

`recording` has the recording itself; this file says when it is used.

Legend: R tokens that choose, N tokens in all, V vocabulary, d model width.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openk3.engine import batch
from openk3.engine.memory import PageMemory
from openk3.engine.plan import UNKNOWN, Chunk
from openk3.engine.recording import Recorder
from openk3.engine.types import EngineConfig
from openk3.errors import BackendError, ConfigError
from openk3.model.block import K3Layer
from openk3.model.k3 import K3
from openk3.model.kda import KimiDeltaAttention, ShortConv
from openk3.model.layers import RMSNorm, SituMLP
from openk3.model.mla import GatedMLA
from openk3.model.moe import Experts, LatentMoE, Router
from openk3.model.ports import LocalDispatcher
from openk3.ops.kda.decode import Pending
from openk3.ops.mla import multiplications
from openk3.ops.native import BACKENDS
from openk3.ops.native.program import Segment, numbers

log = logging.getLogger(__name__)

MAX_ROWS = 2048
"""Tokens of a pass: room for their activations is held."""
THREAD_BYTES = 4 << 20
"""Weights a token reads that are worth a thread."""
KNOWN = {
    K3, K3Layer, RMSNorm, nn.Linear, nn.Embedding, nn.ModuleList, SituMLP, KimiDeltaAttention,
    ShortConv, GatedMLA, LatentMoE, Router, Experts,
}  # fmt: skip
"""What the recording knows to compute. Anything else, an adapter say, would be left out."""
APART = ("vision_tower", "mm_projector", "mtp")
"""Parts of a model that are not on the way from a token to its logits."""


class NativePasses:
    """Runs chunks through the model's recording. Its memory is the runner's pool and windows."""

    def __init__(
        self, model: K3, memory: PageMemory, pending: dict[int, Pending], config: EngineConfig
    ) -> None:
        self.model, self.memory, self.pending = model, memory, pending
        self.max_rows = min(MAX_ROWS, config.max_batch_tokens)
        self.max_wanted = min(self.max_rows, config.max_running * (config.num_drafts + 1))
        parts = (part for name, part in model.named_children() if name not in APART)
        modules = [module for part in parts for module in part.modules()]
        self._tables: list[tuple[Any, str]] = [
            (table, name)
            for module in modules
            for table in (module._parameters, module._buffers)
            for name, x in table.items()
            if x is not None
        ]
        self._work = _multiplications(model)
        self.threads = max(1, 4 * self._work // THREAD_BYTES)
        sizes = model.config
        self._mla = (
            sizes.num_attention_heads, sizes.qk_nope_head_dim, sizes.qk_rope_head_dim,
            sizes.v_head_dim, sizes.kv_lora_rank,
        )  # fmt: skip
        self._record()

    def _record(self) -> None:
        self._places = self._weights()
        rows = self.max_rows, self.max_wanted
        self._recorder = Recorder(self.model, self.memory, self.pending, *rows)

    def _weights(self) -> list[int]:
        """Where the weights are: loading new ones may move them."""
        return [table[name].data_ptr() for table, name in self._tables]

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a pass of these chunks can be run: all tokens known, no pictures' among them, and
        none so many behind so many that attention were much cheaper in its expanded form."""
        if sum(len(chunk.token_ids) for chunk in chunks) > self.max_rows:
            return False
        return not any(
            _sees(chunk) or chunk.token_ids == (UNKNOWN,) or self._expands(chunk)
            for chunk in chunks
        )

    def _expands(self, chunk: Chunk) -> bool:
        """Whether the form of attention that is recorded would more than double a chunk's work."""
        tokens = len(chunk.token_ids)
        expanded, absorbed = multiplications(tokens, chunk.start + tokens, *self._mla)
        layers = len(self.memory.mla_layers)
        return layers * absorbed > 2 * (tokens * self._work + layers * expanded)

    def run(
        self, decode: Sequence[Chunk], prefill: Sequence[Chunk], accepted: Mapping[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Logits [R, V] of the tokens that choose, decoding rows first, and hidden states [N, d] of
        all, without any that fill up; both are valid until the next call."""
        if self._weights() != self._places:
            self._record()
        segments = [self._decoding(chunk, accepted) for chunk in decode]
        segments += [_segment(chunk) for chunk in prefill]
        flat = numbers(segments, self.memory.geometry.kda_groups)
        threads = min(torch.get_num_threads(), self.threads)
        self._recorder.program.run(flat, threads)
        wanted = sum(len(segment.wanted) for segment in segments)
        rows = sum(len(segment.ids) for segment in segments)
        return self._recorder.logits[:wanted], self._recorder.hidden[:rows]

    def _decoding(self, chunk: Chunk, accepted: Mapping[int, int]) -> Segment:
        if not self.pending:
            return _segment(chunk)
        replayed = accepted.get(chunk.slot, 0)
        return _segment(chunk, window=(chunk.slot, replayed, batch.advance(chunk)))


def _multiplications(model: K3) -> int:
    """Of one token with weights, in all layers: experts that it is not sent to left out."""
    share = model.config.num_experts_per_token / model.config.num_experts
    sizes = [(n, p.numel()) for n, p in model.layers.named_parameters()]
    return int(sum(size * (share if ".experts." in name else 1) for name, size in sizes))


def _sees(chunk: Chunk) -> bool:
    """Whether a chunk has tokens of a prompt with pictures, whose embeddings are not of its ids."""
    if chunk.request.media is None:
        return False
    known = chunk.start + len(chunk.token_ids) - chunk.num_drafts
    return not chunk.samples or chunk.start < known - len(chunk.output_ids)


def _segment(chunk: Chunk, window: tuple[int, int, int] = (-1, 0, 0)) -> Segment:
    count = len(chunk.token_ids)
    return Segment(
        chunk.token_ids,
        chunk.start,
        chunk.state_pages,
        chunk.latent_pages,
        [(point.position - chunk.start, point.pages) for point in batch.inside(chunk)],
        range(count - chunk.num_drafts - 1, count) if chunk.samples else range(0),
        *window,
    )


def native_passes(
    model: K3, memory: PageMemory, pending: dict[int, Pending], config: EngineConfig
) -> NativePasses | None:
    """Compiled passes where they can be had; None where not, or if `config.compiled` is False.

    Raises ConfigError if that is True and they cannot be had.
    """
    if config.compiled is False:
        return None
    problem = unfit(model)
    if problem is None:
        try:
            made = NativePasses(model, memory, pending, config)
            log.info("steps of up to %d tokens run as compiled C++ code", made.max_rows)
            return made
        except BackendError as error:
            problem = str(error)
    if config.compiled:
        raise ConfigError(f"compiled = true cannot be honoured: {problem}")
    if model.lm_head.weight.device.type == "cpu":
        log.info("steps run as Python, several times slower: %s", problem)
    return None


def unfit(model: K3) -> str | None:
    """Why a model cannot be recorded, or None."""
    weight = model.lm_head.weight
    attn = model.config.linear_attn
    usable, reason = BACKENDS.backends[0].usable(
        device=weight.device, dtype=weight.dtype, taps=attn.short_conv_kernel_size
    )
    if not usable:
        return reason
    for name, part in model.named_children():
        for module in part.modules() if name not in APART else ():
            if type(module) not in KNOWN or module._forward_hooks or module._forward_pre_hooks:
                return f"{type(module).__name__} modules, or hooks on modules, are not compiled"
            if isinstance(module, LatentMoE) and (
                type(module.dispatcher) is not LocalDispatcher
                or type(module.experts) is not Experts
            ):
                return "experts that are packed or lie elsewhere are not compiled"
    kinds = {p.dtype for n, p in model.named_parameters() if n.partition(".")[0] not in APART}
    return None if kinds == {torch.float32} else f"weights of {kinds} are not compiled"
