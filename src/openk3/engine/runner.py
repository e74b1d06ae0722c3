"""Runs the scheduler's steps on a model: plan -> tensors -> one forward pass -> chosen tokens."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from openk3.engine import batch
from openk3.engine.fingerprint import of_weights
from openk3.engine.graphs import DecodeGraphs
from openk3.engine.layer_drafts import LayerDrafts
from openk3.engine.logprobs import Scores
from openk3.engine.native import native_passes
from openk3.engine.page_memory import PageMemory
from openk3.engine.paged import PagedSequence
from openk3.engine.pictures import Pictures, expand
from openk3.engine.plan import UNKNOWN, Chunk, ChunkResult, Prompt, Results, StepPlan
from openk3.engine.sampling import Choice, Chosen, start_choosing
from openk3.engine.transfer import on_device
from openk3.engine.types import EngineConfig, Request
from openk3.engine.verify import num_own, result_of, sampling_rows, standing
from openk3.model import two_phase
from openk3.model.k3 import K3
from openk3.model.mode import evaluation_mode
from openk3.model.ports import Context
from openk3.ops.kda.decode import Pending


class ModelRunner:
    """A Runner for a model on one device."""

    def __init__(self, model: K3, config: EngineConfig) -> None:
        weight = model.lm_head.weight
        self.model, self.config, self.device = model, config, weight.device
        self.memory = PageMemory(model.config, config, weight.device, weight.dtype)
        self.geometry = self.memory.geometry
        self.vocab_size = model.config.vocab_size
        self.end_id = model.config.eos_token_id
        self.max_positions = model.config.max_position_embeddings
        self._window = config.num_drafts + 1
        self._pending = self._windows() if config.num_drafts and not config.batch_invariant else {}
        self._accepted: dict[int, int] = {}
        self.runs_beside_host = weight.is_cuda
        """Whether a step that was launched computes while the host does something else."""
        self._last = torch.zeros(config.max_running, dtype=torch.int64, device=self.device)
        """[slots] the tokens that the last steps chose."""
        self._drafts = None
        if config.num_drafts and config.draft == "mtp":
            self._drafts = LayerDrafts(model, self.memory, config.seed)
        self._pictures = Pictures(model)
        two = weight.is_cuda if config.two_phase is None else config.two_phase
        self._trunk = partial(two_phase.trunk, model) if two else model.trunk
        self._native = native_passes(model, self.memory, self._pending, config)
        self._graphs: DecodeGraphs | None = None
        if weight.is_cuda and config.cuda_graphs:
            self._graphs = DecodeGraphs(self._forward, self.memory, self._pending)

    def _windows(self) -> dict[int, Pending]:
        """Room for the projected inputs of every running sequence's last window, by KDA layer."""
        heads, width = self.memory.S_shape[:2]
        shape = (self.config.max_running, self._window, heads)

        def zeros(*more: int) -> Tensor:
            return torch.zeros(*shape, *more, dtype=self.memory.dtype, device=self.device)

        def window() -> Pending:
            return Pending(zeros(width), zeros(width), zeros(width), zeros(width), zeros())

        return {layer: window() for layer in self.memory.kda_layers}

    @torch.inference_mode()
    def warm_up(self) -> bool:
        """Record the decoding steps of all batch sizes, so that none is when it is waited for."""
        if self._graphs is not None:
            with evaluation_mode(self.model):
                for tokens in {1, self._window}:
                    self._graphs.record(self.config.max_running, tokens)
        return self.device.type == "cuda"

    def forget(self, slot: int) -> None:
        self._accepted.pop(slot, None)
        self._pictures.forget(slot)

    def drop_host(self) -> None:
        self.memory.drop_host()

    def read_host(self, pages: Sequence[int]) -> bytes:
        return self.memory.read_host(pages)

    def write_host(self, pages: Sequence[int], data: bytes) -> None:
        self.memory.write_host(pages, data)

    def fingerprint(self) -> str:
        """Of the config, how memory is cut, and every weight."""
        digest = hashlib.blake2b(of_weights(self.model), digest_size=12)
        digest.update(repr((self.model.config, self.geometry, self.memory.dtype)).encode())
        return digest.hexdigest()

    def expand(self, request: Request) -> Prompt:
        """Each picture's media id once for each of its rows. Raises InputError."""
        return expand(request, self.model)

    def run(self, plan: StepPlan) -> Sequence[ChunkResult]:
        """One forward pass. Raises nothing for a bad request: its result carries the error."""
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Results:
        """Start a forward pass; on a CPU it is also ended."""
        if plan.poison:
            self.memory.poison(plan.poison)
        self.memory.copy(plan.copies)
        fresh = [page for c in plan.chunks if c.start == 0 for page in c.state_pages]
        if fresh:
            self.memory.clear(fresh)
        with evaluation_mode(self.model) if self.model.training else nullcontext():
            return self._advance(plan.chunks) if plan.chunks else list

    def _advance(self, chunks: Sequence[Chunk]) -> Results:
        """All chunks in one pass."""
        if self._drafts is not None:
            chunks = self._drafts.draft(chunks)
        decode = [c for c in chunks if self._is_decode(c)]
        taken = frozenset(c.slot for c in decode)
        prefill = [c for c in chunks if c.slot not in taken]
        behind = taken if self._pending else frozenset()
        before, after = batch.state_copies(chunks, behind)
        self.memory.copy(before)
        logits, hidden = self._pass(decode, prefill)
        self.memory.copy(after)
        ordered = (*decode, *prefill)
        rows = [row for c in ordered for row in sampling_rows(c)]
        chosen = start_choosing(logits, rows, self.config.seed) if rows else None
        if chosen is not None:
            self._remember(chosen, ordered)
        scores = self._scores(prefill, hidden)

        def results() -> Sequence[ChunkResult]:
            choices = iter(chosen.wait() if chosen else [])
            found = {c.slot: self._result(c, c.slot in behind, choices) for c in ordered}
            for slot, score in scores.items():
                found[slot] = replace(found[slot], prompt_logprobs=score.wait())
            if self._drafts is not None:
                ends = [num_own(c, len(found[c.slot].new_ids)) for c in ordered]
                unfilled = len(hidden) == sum(len(c.token_ids) for c in chunks)
                firsts = batch.firsts((), ordered) if unfilled else batch.firsts(decode, prefill)
                self._drafts.keep(ordered, ends, hidden, firsts)
            return [found[chunk.slot] for chunk in chunks]

        return results

    def _scores(self, prefill: Sequence[Chunk], hidden: Tensor) -> dict[int, Scores]:
        """By slot, what is asked of the chunks' own tokens, which end a packed row [N, d]."""
        found: dict[int, Scores] = {}
        end = len(hidden)
        for chunk in reversed(prefill):
            begin = end = end - len(chunk.token_ids)
            ids, top = chunk.scored(), chunk.request.params.prompt_logprobs
            if ids and top is not None:
                own = hidden[begin : begin + len(ids)]
                found[chunk.slot] = Scores(own, self.model.lm_head, ids, top)
        return found

    def _remember(self, chosen: Chosen, chunks: Sequence[Chunk]) -> None:
        """Keep the tokens where a step that is launched before they are known finds them."""
        if self.config.overlaps(self.runs_beside_host):
            slots = [c.slot for c in chunks if c.samples]
            self._last[on_device(slots, self.device)] = chosen.ids

    def _fill_in(self, ids: Tensor, decode: Sequence[Chunk]) -> Tensor:
        """ids [N] of a packed row, after the tokens that only the device knows are put in."""
        rows = [i for i, c in enumerate(decode) if c.token_ids == (UNKNOWN,)]
        if rows:
            slots = on_device([decode[i].slot for i in rows], self.device)
            ids[on_device(rows, self.device)] = self._last[slots]
        return ids

    def _is_decode(self, chunk: Chunk) -> bool:
        """Whether a chunk takes the path of decoding rows.

        A row behind a window must: that is where its state catches up with its tokens.
        """
        if self._accepted.get(chunk.slot) or chunk.token_ids == (UNKNOWN,):
            return True
        few = chunk.samples and len(chunk.token_ids) <= self._window and chunk.start > 0
        return few and bool(chunk.output_ids) and not chunk.inner_checkpoints

    def _pass(self, decode: Sequence[Chunk], prefill: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
        """Logits [R, V] of the tokens that choose, decoding rows first; hidden states [N, d]."""
        if self._native is not None and self._native.takes((*decode, *prefill)):
            logits, hidden = self._native.run(decode, prefill, self._accepted)
            if self._drafts is not None:
                self._drafts.extend_chunks((*decode, *prefill), hidden)
            return logits, hidden
        rows = batch.decode_rows(decode, self.memory, self._accepted)
        if self._graphs is not None and not prefill:
            logits, hidden = self._graphs.run(rows, lambda ids: self._fill_in(ids, decode))
            return logits[on_device(batch.wanted(rows, decode, prefill), self.device)], hidden
        step = batch.build(rows, decode, prefill, self.memory, self._pending)
        self._fill_in(step.input_ids[0], decode)
        x = self.model.embed_tokens(step.input_ids)
        if any(c.request.media for c in prefill):
            parts = x[0].split([len(rows.ids), *(len(c.token_ids) for c in prefill)])
            spliced = map(self._pictures.splice, parts[1:], prefill)
            x = torch.cat([parts[0], *spliced])[None]
        hidden = self._hidden(step.input_ids, x, step.sequence)
        return self.model.lm_head(hidden[step.wanted]), hidden

    def _forward(self, ids: Tensor, sequence: PagedSequence) -> tuple[Tensor, Tensor]:
        """Logits [N, V] and hidden states [N, d] of every token of a packed row [1, N]."""
        hidden = self._hidden(ids, self.model.embed_tokens(ids), sequence)
        return self.model.lm_head(hidden), hidden

    def _hidden(self, ids: Tensor, x: Tensor, sequence: PagedSequence) -> Tensor:
        """[N, d] of a packed row of embeddings x [1, N, d]."""
        hidden = self._trunk(x, Context(sequence))[0]
        if self._drafts is not None:
            self._drafts.extend(ids, hidden, sequence)
        return hidden

    def _result(self, chunk: Chunk, windowed: bool, choices: Iterator[Choice]) -> ChunkResult:
        """What the chunk's part of the choices brings; notes how much of a window to replay."""
        count = chunk.num_drafts + 1 if chunk.samples else 0
        kept = standing(chunk, list(itertools.islice(choices, count)))
        if windowed:
            self._accepted[chunk.slot] = num_own(chunk, len(kept)) - batch.advance(chunk)
        return result_of(chunk, kept)
