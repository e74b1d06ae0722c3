"""Runs the scheduler's steps on a model: plan -> tensors -> one forward pass -> chosen tokens."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openk3.engine.memory import PageMemory
from openk3.engine.paged import DecodeRows, PagedSequence, PrefillChunk, PrefillRows
from openk3.engine.pictures import Pictures, expand
from openk3.engine.plan import Checkpoint, Chunk, ChunkResult, Copy, Prompt, StepPlan
from openk3.engine.sampling import Choice, Row, choose
from openk3.engine.types import EngineConfig, Request
from openk3.model.k3 import K3
from openk3.model.mode import evaluation_mode
from openk3.model.ports import Context
from openk3.ops.kda.decode import Pending


@dataclass(frozen=True)
class _Batch:
    """A plan's chunks as the model sees them."""

    decode: list[Chunk]
    """Advance by a token and its drafts each, all by as many (some are filled up)."""
    prefill: list[Chunk]
    input_ids: Tensor
    """[1, N]"""
    sequence: PagedSequence
    wanted: Tensor
    """Rows of the hidden states that choose a token."""
    before: list[Copy]
    after: list[Copy]
    """Checkpoints that are whole copies of live states."""


class _Places:
    """The tokens of a step in the order of the packed row, and where their latents go."""

    def __init__(self, page_tokens: int, scratch: int) -> None:
        self.page_tokens, self.scratch = page_tokens, scratch
        self.ids: list[int] = []
        self.page: list[int] = []
        self.offset: list[int] = []

    def add(self, chunk: Chunk, room: int) -> None:
        """A chunk's tokens, filled up to `room` with tokens that nobody will see."""
        positions = range(chunk.start, chunk.start + len(chunk.token_ids))
        spare = room - len(positions)
        self.ids += chunk.token_ids + chunk.token_ids[-1:] * spare
        self.page += [chunk.latent_pages[p // self.page_tokens] for p in positions]
        self.offset += [p % self.page_tokens for p in positions]
        self.page += [self.scratch] * spare
        self.offset += [0] * spare


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
        self._pending = self._windows() if config.num_drafts else {}
        self._accepted: dict[int, int] = {}
        self._pictures = Pictures(model)

    def _windows(self) -> dict[int, Pending]:
        """Room for the projected inputs of every running sequence's last window, by KDA layer."""
        heads, width = self.memory.S_shape[:2]
        shape = (self.config.max_running, self._window, heads)

        def zeros(*more: int) -> Tensor:
            return torch.zeros(*shape, *more, dtype=self.memory.dtype, device=self.device)

        def window() -> Pending:
            return Pending(zeros(width), zeros(width), zeros(width), zeros(width), zeros())

        return {layer: window() for layer in self.memory.kda_layers}

    def forget(self, slot: int) -> None:
        self._accepted.pop(slot, None)
        self._pictures.forget(slot)

    def drop_host(self) -> None:
        self.memory.drop_host()

    def expand(self, request: Request) -> Prompt:
        """Each picture's media id once for each of its rows. Raises InputError."""
        return expand(request, self.model)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Sequence[ChunkResult]:
        """One forward pass. Raises nothing for a bad request: its result carries the error."""
        if plan.poison:
            self.memory.poison(plan.poison)
        self.memory.copy(plan.copies)
        fresh = [c for c in plan.chunks if c.start == 0]
        if fresh:
            self.memory.clear([page for c in fresh for page in c.state_pages])
        if not plan.chunks:
            return []
        batch = self._batch(plan.chunks)
        self.memory.copy(batch.before)
        with evaluation_mode(self.model):
            hidden = self._forward(batch)
            logits = self.model.lm_head(hidden[0, batch.wanted])
        self.memory.copy(batch.after)
        return self._results(plan.chunks, batch, logits)

    def _forward(self, batch: _Batch) -> Tensor:
        x = self.model.embed_tokens(batch.input_ids)
        parts = batch.sequence.prefill.chunks if batch.sequence.prefill is not None else []
        for chunk, part in zip(batch.prefill, parts, strict=True):
            if chunk.request.media is not None:
                here = slice(part.first, part.first + part.count)
                x[0, here] = self._pictures.splice(x[0, here], chunk)
        return self.model.trunk(x, Context(batch.sequence))

    def _is_decode(self, chunk: Chunk) -> bool:
        """Whether a chunk takes the path of decoding rows.

        A row behind a window must: that is where its state catches up with its tokens.
        """
        if self._accepted.get(chunk.slot):
            return True
        few = chunk.samples and len(chunk.token_ids) <= self._window and chunk.start > 0
        return few and bool(chunk.output_ids) and not _inside(chunk)

    def _batch(self, chunks: Sequence[Chunk]) -> _Batch:
        decode = [c for c in chunks if self._is_decode(c)]
        taken = {c.slot for c in decode}
        prefill = [c for c in chunks if c.slot not in taken]
        tokens = max((len(c.token_ids) for c in decode), default=0)
        places = _Places(self.geometry.page_tokens, self.memory.scratch)
        for chunk in decode:
            places.add(chunk, tokens)
        for chunk in prefill:
            places.add(chunk, len(chunk.token_ids))
        sequence = PagedSequence(
            self.memory,
            self._ints(places.page),
            self._ints(places.offset),
            self._decode_rows(decode, tokens) if decode else None,
            self._prefill_rows(prefill, tokens * len(decode)) if prefill else None,
            self._pending,
        )
        return _Batch(
            decode,
            prefill,
            self._ints(places.ids)[None],
            sequence,
            self._wanted(decode, prefill, tokens),
            *self._state_copies(decode, prefill),
        )

    def _ints(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _decode_rows(self, chunks: Sequence[Chunk], tokens: int) -> DecodeRows:
        longest = max(len(c.latent_pages) for c in chunks)
        table = [(*c.latent_pages, *c.latent_pages[:1] * longest)[:longest] for c in chunks]
        groups = zip(*(c.state_pages for c in chunks), strict=True)
        rows = DecodeRows(
            tokens,
            self._ints(table, torch.int32),
            self._ints([c.start for c in chunks]),
            self._ints([c.start + len(c.token_ids) for c in chunks]),
            self._ints(list(groups), torch.int32),
        )
        if self._pending:
            rows.windows = self._ints([c.slot for c in chunks], torch.int32)
            counts = [self._accepted.get(c.slot, 0) for c in chunks]
            rows.accepted = self._ints(counts, torch.int32)
            rows.advance = self._ints([_advance(c) for c in chunks], torch.int32)
        return rows

    def _prefill_rows(self, chunks: Sequence[Chunk], first: int) -> PrefillRows:
        lengths = [len(c.token_ids) for c in chunks]
        starts = [0, *itertools.accumulate(lengths)]
        parts = [
            PrefillChunk(first + begin, count, c.start, self._ints(c.latent_pages))
            for c, begin, count in zip(chunks, starts[:-1], lengths, strict=True)
        ]
        rows = PrefillRows(
            parts,
            self._ints(starts, torch.int32),
            self._ints(list(zip(*(c.state_pages for c in chunks), strict=True))),
        )
        inner = [(i, point) for i, c in enumerate(chunks) for point in _inside(c)]
        if inner:
            rows.inner = [(i, point.position - chunks[i].start) for i, point in inner]
            rows.inner_flat = self._ints([starts[i] + count - 1 for i, count in rows.inner])
            rows.inner_pages = self._ints(list(zip(*(p.pages for _, p in inner), strict=True)))
        return rows

    def _state_copies(
        self, decode: Sequence[Chunk], prefill: Sequence[Chunk]
    ) -> tuple[list[Copy], list[Copy]]:
        """Checkpoints at a chunk's ends, as copies of its live pages before and after the pass."""
        before: list[Copy] = []
        after: list[Copy] = []
        windowed = {c.slot for c in decode} if self._pending else set()
        for chunk in (*decode, *prefill):
            behind = chunk.slot in windowed
            end = chunk.start + len(chunk.token_ids) - chunk.num_drafts
            for point in chunk.checkpoints:
                copies = [Copy(*pair) for pair in zip(chunk.state_pages, point.pages, strict=True)]
                if point.position == end or (behind and point.position == chunk.start):
                    after += copies  # a row with a window is brought up to its start by the pass
                elif point.position == chunk.start:
                    before += copies
        return before, after

    def _wanted(self, decode: Sequence[Chunk], prefill: Sequence[Chunk], tokens: int) -> Tensor:
        rows: list[int] = []
        for i, chunk in enumerate(decode):
            count = chunk.num_drafts + 1 if chunk.samples else 0
            last = i * tokens + len(chunk.token_ids)
            rows += range(last - count, last)
        begin = tokens * len(decode)
        for chunk in prefill:
            begin += len(chunk.token_ids)
            rows += [begin - 1] if chunk.samples else []
        return self._ints(rows)

    def _results(
        self, chunks: Sequence[Chunk], batch: _Batch, logits: Tensor
    ) -> Sequence[ChunkResult]:
        rows = [row for c in (*batch.decode, *batch.prefill) for row in _sampling_rows(c)]
        choices = iter(choose(logits, rows, self.config.seed) if rows else [])
        results = {c.slot: self._result(c, True, choices) for c in batch.decode}
        results |= {c.slot: self._result(c, False, choices) for c in batch.prefill}
        return [results[chunk.slot] for chunk in chunks]

    def _result(self, chunk: Chunk, decoded: bool, choices: Iterator[Choice]) -> ChunkResult:
        """What a chunk's choices make of its drafts; notes how much of a window to replay next."""
        count = chunk.num_drafts + 1 if chunk.samples else 0
        chosen = list(itertools.islice(choices, count))
        drafts = chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]
        kept = _kept(chunk, drafts, chosen)
        if decoded and self._pending:
            true = len(chunk.token_ids) - chunk.num_drafts
            self._accepted[chunk.slot] = true + max(len(kept) - 1, 0) - _advance(chunk)
        if not chosen:
            return ChunkResult()
        bad = next((choice.error for choice in kept if choice.error), None)
        if bad is not None:
            return ChunkResult(error=bad)
        if chunk.request.constraint is not None:
            chunk.request.constraint.accept(kept[0].token_id)
        logprobs = tuple(c.logprobs for c in kept if c.logprobs is not None)
        return ChunkResult(tuple(c.token_id for c in kept), logprobs or None)


def _kept(chunk: Chunk, drafts: Sequence[int], chosen: list[Choice]) -> list[Choice]:
    """The choices that stand: as long as a draft was right, the one behind it counts too."""
    if chunk.request.constraint is not None:
        return chosen[:1]  # a grammar knows what it allows at the next position only
    right = 0
    while right < len(drafts) and chosen and chosen[right].token_id == drafts[right]:
        right += 1
    return chosen[: right + 1]


def _advance(chunk: Chunk) -> int:
    """By how many tokens the state of a row with a window moves on at once, to a checkpoint."""
    end = chunk.start + len(chunk.token_ids)
    if any(point.position > chunk.start for point in chunk.checkpoints):
        assert chunk.num_drafts == 0, "a state among drafts is asked for"
        assert chunk.checkpoints[-1].position == end
        return len(chunk.token_ids)
    return 0


def _inside(chunk: Chunk) -> list[Checkpoint]:
    """Checkpoints strictly inside of a prefill chunk."""
    end = chunk.start + len(chunk.token_ids)
    return [point for point in chunk.checkpoints if chunk.start < point.position < end]


def _sampling_rows(chunk: Chunk) -> list[Row]:
    """The positions of a chunk for which a token is chosen."""
    if not chunk.samples:
        return []
    known = chunk.start + len(chunk.token_ids) - chunk.num_drafts
    drafts = chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]
    return [
        Row(chunk.request, known + i, (*chunk.output_ids, *drafts[:i]), constrained=i == 0)
        for i in range(chunk.num_drafts + 1)
    ]
