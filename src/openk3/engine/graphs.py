"""Decoding steps as CUDA graphs: one for each (rounded-up) number of rows, captured when first met.

A step's numbers travel to the device in one copy; the graph reads them from where it was captured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openk3.engine.batch import HostRows, decode_rows
from openk3.engine.page_memory import PageMemory
from openk3.engine.paged import DecodeRows, PagedSequence
from openk3.ops.kda.decode import Pending
from openk3.ops.triton_support import power_of_two

Forward = Callable[[Tensor, PagedSequence], tuple[Tensor, Tensor]]
WARM_UPS = 2


def table_width(pages: int) -> int:
    """The pages of a row that a graph has room for: 16, 64, 256 and so on."""
    width = 16
    while width < pages:
        width *= 4
    return width


def num_rows(batch: int) -> int:
    """The rows of the graph that a batch runs in: powers of two, from 16 on multiples of 16."""
    return power_of_two(batch) if batch <= 16 else -(-batch // 16) * 16


@dataclass(frozen=True)
class _Shape:
    """What is fixed in a graph."""

    rows: int
    tokens: int
    pages: int
    groups: int


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    """int64, all inputs one after the other"""
    logits: Tensor
    """[B * T, V]"""
    hidden: Tensor
    """[B * T, d]"""


class DecodeGraphs:
    """Runs steps that only decode. `forward` maps (ids [1, N], sequence) to logits [N, V] and
    hidden states [N, d]."""

    def __init__(self, forward: Forward, memory: PageMemory, pending: dict[int, Pending]) -> None:
        self.forward, self.memory, self.pending = forward, memory, pending
        self._captured: dict[_Shape, _Captured] = {}
        self._pool: Any = None

    def run(self, rows: HostRows, known: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Logits and hidden states [B * T, ...] of the rows' tokens; valid until the next call.

        `known` puts ids [B * T] in place that are on the device alone."""
        pages = table_width(max(len(row) for row in rows.table))
        shape = _Shape(num_rows(len(rows)), rows.tokens, pages, len(rows.states))
        captured = self._recorded(shape)
        numbers = _pack(rows, shape, self.memory.scratch)
        captured.numbers.copy_(numbers, non_blocking=True)
        known(captured.numbers[: len(rows.ids)])
        captured.graph.replay()
        count = len(rows) * rows.tokens
        return captured.logits[:count], captured.hidden[:count]

    def record(self, max_rows: int, tokens: int) -> None:
        """Record the steps of every batch up to max_rows now, for short tables."""
        groups = self.memory.geometry.kda_groups
        for rows in sorted({num_rows(n) for n in range(1, max_rows + 1)}, reverse=True):
            self._recorded(_Shape(rows, tokens, table_width(1), groups))

    def _recorded(self, shape: _Shape) -> _Captured:
        captured = self._captured.get(shape)
        if captured is None:
            captured = self._captured[shape] = self._capture(shape)
        return captured

    def _sequence(self, numbers: Tensor, shape: _Shape) -> tuple[Tensor, PagedSequence]:
        """The views of `numbers` that `_pack` laid out."""
        rows, tokens = shape.rows, shape.rows * shape.tokens
        sizes = [tokens] * 3 + [rows * shape.pages, rows, rows, shape.groups * rows] + [rows] * 3
        ids, page, offset, table, starts, lengths, states, *window = numbers.split(sizes)
        decode = DecodeRows(
            shape.tokens,
            table.view(rows, shape.pages).int(),
            starts,
            lengths,
            states.view(shape.groups, rows).int(),
        )
        if self.pending:
            decode.windows, decode.accepted, decode.advance = (x.int() for x in window)
        return ids[None], PagedSequence(self.memory, page, offset, decode, pending=self.pending)

    def _capture(self, shape: _Shape) -> _Captured:
        """Warm up on rows that touch nothing, then record."""
        numbers = _pack(decode_rows((), self.memory, {}), shape, self.memory.scratch).to(
            self.memory.device
        )
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self.forward(*self._sequence(numbers, shape))
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self.forward(*self._sequence(numbers, shape))
        self._pool = self._pool or graph.pool()
        return _Captured(graph, numbers, *outputs)


def _pack(rows: HostRows, shape: _Shape, scratch: int) -> Tensor:
    """All numbers in one row, filled up with rows that touch nothing but the scratch page."""
    spare = shape.rows - len(rows)
    empty = spare * shape.tokens
    numbers = [*rows.ids, *[0] * empty, *rows.page, *[scratch] * empty, *rows.offset, *[0] * empty]
    for row in [*rows.table, *[()] * spare]:
        numbers += [*row, *[scratch] * (shape.pages - len(row))]
    numbers += [*rows.starts, *[0] * spare, *rows.lengths, *[0] * spare]
    for group in rows.states:
        numbers += [*group, *[-1] * spare]
    for own in (rows.windows, rows.accepted, rows.advance):
        numbers += [*own, *[0] * spare]
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=torch.cuda.is_available())
