"""A plan's chunks as numbers: rows that decode, chunks of prompts, and the tokens of both.

Rows of decoding chunks are filled up to one length with tokens that nobody sees; their latents go
to the scratch page.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.engine.page_memory import PageMemory
from openk3.engine.paged import DecodeRows, PagedSequence, PrefillRows
from openk3.engine.plan import Chunk, Copy
from openk3.engine.transfer import on_device
from openk3.ops.kda.decode import Pending
from openk3.ops.mla.chunks import hold


@dataclass(frozen=True)
class HostRows:
    """Decoding rows as lists; `DecodeRows` says what they are. The token lists are flat [B * T]."""

    tokens: int
    """T"""
    ids: list[int]
    page: list[int]
    offset: list[int]
    table: list[tuple[int, ...]]
    """Rows of their own lengths."""
    starts: list[int]
    lengths: list[int]
    states: list[list[int]]
    windows: list[int]
    accepted: list[int]
    advance: list[int]

    def __len__(self) -> int:
        return len(self.starts)


def decode_rows(
    chunks: Sequence[Chunk], memory: PageMemory, accepted: Mapping[int, int]
) -> HostRows:
    """Rows of chunks that advance by a token and its drafts each. `accepted` is by slot."""
    tokens = max((len(c.token_ids) for c in chunks), default=0)
    ids: list[int] = []
    page: list[int] = []
    offset: list[int] = []
    for chunk in chunks:
        spare = tokens - len(chunk.token_ids)
        ids += chunk.token_ids + chunk.token_ids[-1:] * spare
        own_page, own_offset = places(chunk, memory.geometry.page_tokens)
        page += own_page + [memory.scratch] * spare
        offset += own_offset + [0] * spare
    return HostRows(
        tokens=tokens,
        ids=ids,
        page=page,
        offset=offset,
        table=[c.latent_pages for c in chunks],
        starts=[c.start for c in chunks],
        lengths=[c.end for c in chunks],
        states=[[c.state_pages[g] for c in chunks] for g in range(memory.geometry.kda_groups)],
        windows=[c.slot for c in chunks],
        accepted=[accepted.get(c.slot, 0) for c in chunks],
        advance=[advance(c) for c in chunks],
    )


def places(chunk: Chunk, page_tokens: int) -> tuple[list[int], list[int]]:
    """Page and offset of each token's latent."""
    positions = range(chunk.start, chunk.end)
    pages = [chunk.latent_pages[p // page_tokens] for p in positions]
    return pages, [p % page_tokens for p in positions]


@dataclass(frozen=True)
class Batch:
    """A step for the model."""

    input_ids: Tensor
    """[1, N]"""
    sequence: PagedSequence
    wanted: Tensor
    """The tokens whose logits choose."""


def build(
    rows: HostRows,
    decode: Sequence[Chunk],
    prefill: Sequence[Chunk],
    memory: PageMemory,
    pending: dict[int, Pending],
) -> Batch:
    """Tensors of `rows`, which are `decode`'s, and of the prefill chunks."""
    ids, page, offset = list(rows.ids), list(rows.page), list(rows.offset)
    for chunk in prefill:
        ids += chunk.token_ids
        own_page, own_offset = places(chunk, memory.geometry.page_tokens)
        page += own_page
        offset += own_offset
    device = memory.device
    sequence = PagedSequence(
        memory,
        on_device(page, device),
        on_device(offset, device),
        _device_rows(rows, device, bool(pending)) if decode else None,
        _prefill_rows(prefill, len(rows.ids), memory) if prefill else None,
        pending,
    )
    return Batch(
        on_device(ids, device)[None], sequence, on_device(wanted(rows, decode, prefill), device)
    )


def page_table(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """[B, pages] int32 of rows of their own lengths, filled up with what no one reads."""
    longest = max(len(pages) for pages in rows)
    table = [(*pages, *pages[:1] * longest)[:longest] for pages in rows]
    return on_device(table, device, torch.int32)


def _device_rows(rows: HostRows, device: torch.device, windowed: bool) -> DecodeRows:
    made = DecodeRows(
        rows.tokens,
        page_table(rows.table, device),
        on_device(rows.starts, device),
        on_device(rows.lengths, device),
        on_device(rows.states, device, torch.int32),
    )
    if windowed:
        made.windows = on_device(rows.windows, device, torch.int32)
        made.accepted = on_device(rows.accepted, device, torch.int32)
        made.advance = on_device(rows.advance, device, torch.int32)
    return made


def _prefill_rows(chunks: Sequence[Chunk], first: int, memory: PageMemory) -> PrefillRows:
    device = memory.device
    lengths = [len(c.token_ids) for c in chunks]
    totals = [c.end for c in chunks]
    table = page_table([c.latent_pages for c in chunks], device)
    counts = on_device([totals, lengths], device)
    held = hold(table, counts, totals, lengths, memory.geometry.page_tokens)
    states = list(zip(*(c.state_pages for c in chunks), strict=True))
    rows = PrefillRows(first, held, on_device(states, device))
    inner = [(i, point) for i, c in enumerate(chunks) for point in c.inner_checkpoints]
    if inner:
        starts, taps = [0, *itertools.accumulate(lengths)], memory.conv_shape[1]
        ends = [(i, point.position - chunks[i].start) for i, point in inner]
        rows.inner_flat = on_device([starts[i] + count - 1 for i, count in ends], device)
        tails = [_tail(i, count, starts[i], len(chunks), taps) for i, count in ends]
        rows.inner_tails = on_device(tails, device)
        rows.inner_pages = on_device(list(zip(*(p.pages for _, p in inner), strict=True)), device)
    return rows


def _tail(chunk: int, count: int, begin: int, num_chunks: int, taps: int) -> list[int]:
    """Where the last inputs before a position stand: see `PrefillRows.inner_tails`."""
    inputs = range(count - taps, count)
    return [num_chunks * taps + begin + i if i >= 0 else (chunk + 1) * taps + i for i in inputs]


def wanted(rows: HostRows, decode: Sequence[Chunk], prefill: Sequence[Chunk]) -> list[int]:
    """Places in the packed row of the tokens behind which a token is chosen."""
    found: list[int] = []
    for i, chunk in enumerate(decode):
        last = i * rows.tokens + len(chunk.token_ids)
        found += range(last - chunk.num_drafts - 1, last) if chunk.samples else ()
    end = len(rows.ids)
    for chunk in prefill:
        end += len(chunk.token_ids)
        found += [end - 1] if chunk.samples else []
    return found


def firsts(decode: Sequence[Chunk], prefill: Sequence[Chunk]) -> list[int]:
    """Where each chunk's tokens begin in the packed row."""
    tokens = max((len(c.token_ids) for c in decode), default=0)
    lengths = [tokens for _ in decode] + [len(c.token_ids) for c in prefill]
    return [0, *itertools.accumulate(lengths)][:-1]


def state_copies(chunks: Sequence[Chunk], behind: frozenset[int]) -> tuple[list[Copy], list[Copy]]:
    """Checkpoints that are copies of live pages, before the pass and after it.

    A row whose slot is in `behind` has a window: the pass itself brings its state to its start.
    """
    before: list[Copy] = []
    after: list[Copy] = []
    for chunk in chunks:
        end = chunk.start + chunk.num_known
        for point in chunk.checkpoints:
            copies = [Copy(*pair) for pair in zip(chunk.state_pages, point.pages, strict=True)]
            if point.position == end or (point.position == chunk.start and chunk.slot in behind):
                after += copies
            elif point.position == chunk.start:
                before += copies
    return before, after


def advance(chunk: Chunk) -> int:
    """By how many tokens the state of a row with a window moves on at once, to a checkpoint."""
    if any(point.position > chunk.start for point in chunk.checkpoints):
        assert chunk.num_drafts == 0, "a state among drafts is asked for"
        assert chunk.checkpoints[-1].position == chunk.end, "a state is asked for that is not last"
        return len(chunk.token_ids)
    return 0
