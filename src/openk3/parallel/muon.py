"""Per-Head Muon over the processes of a state group (K3 report §5.2.2).

Momentum, decay and every block whose rows are all on one process stay there. A block that lies
across processes has one owner: for each, only the owner fetches the rows, orthogonalises the whole
and sends the results back, each process getting its own rows. Blocks travel in buckets, and a
bucket is on its way while the one before it is computed, so no process ever holds more than two
buckets of rows that are not its own.

`muon_owners` says who owns what.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openk3.optim.muon import Muon, MuonParameter, scale_of
from openk3.parallel.layout import Span
from openk3.parallel.muon_owners import Rows, Unit, assign_owners, buckets_of, rows_of
from openk3.parallel.zero import Piece

BUCKET_ELEMENTS = 1 << 24
"""Elements an owner fetches at a time."""


class ShardedMuon(Muon):
    """`Muon` of which every process of `group` holds `pieces` of the parameters."""

    def __init__(
        self,
        parameters: Sequence[MuonParameter],
        *,
        pieces: Mapping[str, Piece],
        group: dist.ProcessGroup,
        bucket_elements: int = BUCKET_ELEMENTS,
        **options: Any,
    ) -> None:
        """parameters: `weight` is this process's rows. Other options are Muon's."""
        rows = [rows_of(p, pieces[p.name]) for p in parameters]
        place, size = group.rank(), group.size()
        within = []
        for one in rows:
            first, (start, stop) = one.spans[place][0], one.home(place)
            within.append(slice(start - first, stop - first) if start < stop else slice(0, 0))
        super().__init__(parameters, within=within, **options)
        units = assign_owners(rows, size)
        self._buckets = [
            _Bucket(bucket, rows, place, group, self.weights[0].device)
            for bucket in buckets_of(units, rows, size, bucket_elements)
        ]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """As `Muon.step`; every process of the group must call it."""
        updates = self._advance(lr)
        coming = self._buckets[0].fetch(updates, self.dtype) if self._buckets else None
        self._apply(updates, lr)
        going: _Journey | None = None
        for i, bucket in enumerate(self._buckets):
            assert coming is not None, "a bucket is fetched before its turn"
            coming, arrived = None, coming.wait()
            if i + 1 < len(self._buckets):
                coming = self._buckets[i + 1].fetch(updates, self.dtype)
            bucket.compute(arrived, self._orthogonal)
            if going is not None:
                self._buckets[i - 1].apply(going.wait(), self.weights, lr)
            going = bucket.give_back(arrived)
        if going is not None:
            self._buckets[-1].apply(going.wait(), self.weights, lr)


@dataclass
class _Journey:
    """A buffer on its way; what it comes from must live as long."""

    work: Any
    target: Tensor
    source: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.target


@dataclass(frozen=True)
class _Part:
    """Rows of one unit on one process: `rows` of the process's weight, at `at` of a buffer."""

    unit: int
    rows: slice
    within: slice
    """The same rows, counted from the unit's first."""
    at: slice


class _Bucket:
    """The units of one round: what leaves here, what comes here, what is computed here."""

    def __init__(
        self,
        units: Sequence[Unit],
        rows: Sequence[Rows],
        place: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.units, self.rows, self.group = units, rows, group
        outward: list[list[tuple[int, Span]]] = [[] for _ in range(group.size())]
        inward: list[list[tuple[int, Span]]] = [[] for _ in range(group.size())]
        for i, unit in enumerate(units):
            for holder, span in rows[unit.parameter].parts(unit.period):
                if holder == place:
                    outward[unit.owner].append((i, span))
                if unit.owner == place:
                    inward[holder].append((i, span))
        self._leaving, self._out_sizes = self._lay_out(outward, place)
        self._arriving, self._in_sizes = self._lay_out(inward, place)
        self._scales = [self._scale(part).to(device) for part in self._leaving]

    def fetch(self, updates: Sequence[Tensor], dtype: torch.dtype) -> _Journey:
        """Send rows to their owners."""
        source = updates[0].new_empty(sum(self._out_sizes), dtype=dtype)
        for part in self._leaving:
            rows = updates[self.units[part.unit].parameter].flatten(0, -2)[part.rows]
            source[part.at] = rows.flatten()
        return self._travel(source, self._in_sizes, self._out_sizes)

    def compute(self, arrived: Tensor, orthogonal: Any) -> None:
        """Orthogonalise the units owned here, in place."""
        whole: dict[int, Tensor] = {}
        for part in self._arriving:
            one = self.rows[self.units[part.unit].parameter]
            if part.unit not in whole:
                whole[part.unit] = arrived.new_empty(one.period, one.columns)
            whole[part.unit][part.within] = arrived[part.at].view(-1, one.columns)
        blocks: dict[torch.Size, list[Tensor]] = {}
        for i, matrix in whole.items():
            for block in matrix.split(self.rows[self.units[i].parameter].blocks):
                blocks.setdefault(block.shape, []).append(block)
        for alike in blocks.values():
            for block, moved in zip(alike, orthogonal([b[None] for b in alike]), strict=True):
                block.copy_(moved[0])
        for part in self._arriving:
            arrived[part.at] = whole[part.unit][part.within].flatten()

    def give_back(self, computed: Tensor) -> _Journey:
        """Send each process its rows of the results."""
        return self._travel(computed, self._out_sizes, self._in_sizes)

    def apply(self, results: Tensor, weights: Sequence[Tensor], lr: float) -> None:
        """Add the results to the rows here."""
        for part, scale in zip(self._leaving, self._scales, strict=True):
            target = weights[self.units[part.unit].parameter].flatten(0, -2)[part.rows]
            result = results[part.at].view_as(target).to(target.dtype)
            target.addcmul_(result, scale, value=-lr)

    def _travel(self, source: Tensor, received: list[int], sent: list[int]) -> _Journey:
        target = source.new_empty(sum(received))
        work = dist.all_to_all_single(
            target, source, received, sent, group=self.group, async_op=True
        )
        return _Journey(work, target, source)

    def _lay_out(
        self, by_peer: list[list[tuple[int, Span]]], place: int
    ) -> tuple[list[_Part], list[int]]:
        parts, sizes, end = [], [], 0
        for listed in by_peer:
            begin = end
            for i, (start, stop) in listed:
                one, unit = self.rows[self.units[i].parameter], self.units[i]
                here, low = one.spans[place][0], unit.period * one.period
                size = (stop - start) * one.columns
                parts.append(
                    _Part(
                        i,
                        slice(start - here, stop - here),
                        slice(start - low, stop - low),
                        slice(end, end + size),
                    )
                )
                end += size
            sizes.append(end - begin)
        return parts, sizes

    def _scale(self, part: _Part) -> Tensor:
        """[rows, 1]: the factor of the block that each row belongs to."""
        one = self.rows[self.units[part.unit].parameter]
        factors = [scale_of(height, one.columns) for height in one.blocks]
        whole = torch.tensor(factors).repeat_interleave(torch.tensor(one.blocks))
        return whole[part.within, None]
