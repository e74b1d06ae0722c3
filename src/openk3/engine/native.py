"""Passes on a CPU as one call: the model recorded as a program of C++ kernels.

What CUDA graphs are to a GPU (`graphs`): the same operations over the same memory, without Python
between them. A decoding step reads each weight once and spends next to nothing beside.

`recordable` says of which models, `recording` has the recording itself; this file says when it is
used.

Legend: R tokens that choose, N tokens in all, V vocabulary, d model width.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.engine import batch
from openk3.engine.page_memory import PageMemory
from openk3.engine.plan import UNKNOWN, Chunk
from openk3.engine.recordable import Standing, unfit
from openk3.engine.recording import Recorder
from openk3.engine.types import EngineConfig
from openk3.errors import BackendError, ConfigError
from openk3.model.k3 import K3
from openk3.ops.kda.decode import Pending
from openk3.ops.mla import multiplications
from openk3.ops.native.build import build_later
from openk3.ops.native.program import Segment, numbers

log = logging.getLogger(__name__)

MAX_ROWS = 2048
"""Tokens of a pass: room for their activations is held."""
THREAD_BYTES = 4 << 20
"""Weights a token reads that are worth a thread."""


class NativePasses:
    """Runs chunks through the model's recording. Its memory is the runner's pool and windows."""

    def __init__(
        self, model: K3, memory: PageMemory, pending: dict[int, Pending], config: EngineConfig
    ) -> None:
        self.model, self.memory, self.pending = model, memory, pending
        self.max_rows = min(MAX_ROWS, config.max_batch_tokens)
        self.max_wanted = min(self.max_rows, config.max_running * (config.num_drafts + 1))
        self._work = _multiplications(model)
        self.threads = max(1, 4 * self._work // THREAD_BYTES)
        sizes = model.config
        self._mla = (
            sizes.num_attention_heads, sizes.qk_nope_head_dim, sizes.qk_rope_head_dim,
            sizes.v_head_dim, sizes.kv_lora_rank,
        )  # fmt: skip
        self._standing, self._recorder = Standing(model), None
        # whoever wants the same floats always waits for the compiler
        later = config.compiled == "later" and not config.batch_invariant
        self._building = Building.begin() if later else None
        if self._building is None:
            self._recorder = self._recorded()

    def _recorded(self) -> Recorder:
        return Recorder(self.model, self.memory, self.pending, self.max_rows, self.max_wanted)

    def _stands(self) -> bool:
        """Whether there is a recording of the model as it is; it is recorded anew where it can."""
        if self._building is not None and not self._building.ended():
            return False
        if self._building is not None or not self._standing.holds():
            self._building, self._recorder = None, None
            problem = unfit(self.model)
            self._standing = Standing(self.model)
            if problem is None:
                self._recorder = self._recorded()
            else:
                log.warning("steps run as Python from now on: %s", problem)
        return self._recorder is not None

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a pass of these chunks can be run: all tokens known, no pictures' among them, and
        none so many behind so many that attention were much cheaper in its expanded form. To be
        asked before each `run`: the model may have changed."""
        if not self._stands() or sum(len(chunk.token_ids) for chunk in chunks) > self.max_rows:
            return False
        return not any(
            _sees(chunk) or chunk.token_ids == (UNKNOWN,) or self._expands(chunk)
            for chunk in chunks
        )

    def _expands(self, chunk: Chunk) -> bool:
        """Whether the form of attention that is recorded would more than double a chunk's work."""
        tokens = len(chunk.token_ids)
        expanded, absorbed = multiplications(tokens, chunk.end, *self._mla)
        layers = len(self.memory.mla_layers)
        return layers * absorbed > 2 * (tokens * self._work + layers * expanded)

    def run(
        self, decode: Sequence[Chunk], prefill: Sequence[Chunk], accepted: Mapping[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Logits [R, V] of the tokens that choose, decoding rows first, and hidden states [N, d] of
        all, without any that fill up; both are valid until the next call."""
        assert self._recorder is not None, "run without takes"
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


@dataclass
class Building:
    """A compiler at work beside plain steps. These leave it a core: threads that wait for one that
    lost its core make steps of small models several times slower."""

    compiler: threading.Thread
    threads: int
    """That steps have otherwise."""

    @classmethod
    def begin(cls) -> "Building | None":
        """None if the library is there already, or cannot be built."""
        compiler = build_later()
        if compiler is None:
            return None
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, threads - 1))
        return cls(compiler, threads)

    def ended(self) -> bool:
        """Whether the compiler is done; if so, steps have all threads again."""
        done = not self.compiler.is_alive()
        if done:
            torch.set_num_threads(self.threads)
        return done


def _multiplications(model: K3) -> int:
    """Of one token with weights, in all layers: experts that it is not sent to left out."""
    share = model.config.num_experts_per_token / model.config.num_experts
    sizes = [(n, p.numel()) for n, p in model.layers.named_parameters()]
    return int(sum(size * (share if ".experts." in name else 1) for name, size in sizes))


def _sees(chunk: Chunk) -> bool:
    """Whether a chunk has tokens of a prompt with pictures, whose embeddings are not of its ids."""
    if chunk.request.media is None:
        return False
    known = chunk.start + chunk.num_known
    return not chunk.samples or chunk.start < known - len(chunk.output_ids)


def _segment(chunk: Chunk, window: tuple[int, int, int] = (-1, 0, 0)) -> Segment:
    count = len(chunk.token_ids)
    return Segment(
        chunk.token_ids,
        chunk.start,
        chunk.state_pages,
        chunk.latent_pages,
        [(point.position - chunk.start, point.pages) for point in chunk.inner_checkpoints],
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
    if config.compiled is True:
        raise ConfigError(f"compiled = true cannot be honoured: {problem}")
    if model.lm_head.weight.device.type == "cpu":
        log.info("steps run as Python, several times slower: %s", problem)
    return None
