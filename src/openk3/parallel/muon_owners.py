"""Who orthogonalises which rows in distributed Muon (`parallel.muon`): arithmetic on shapes.

A period is what repeats down a parameter's rows: the blocks of one head, say. One whose rows are
all on one process is computed there; one that lies across processes has an owner. The heaviest
period goes first to the least loaded process, counting what each has to do at home. Every process
comes to the same result.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from openk3.optim.muon import MuonParameter
from openk3.parallel.layout import Span
from openk3.parallel.zero import Piece


@dataclass(frozen=True)
class Rows:
    """How the rows of one parameter's matrices, one below the other, lie on the processes."""

    spans: tuple[Span, ...]
    """By place."""
    blocks: tuple[int, ...]
    """Heights that repeat down the rows."""
    columns: int

    @property
    def period(self) -> int:
        return sum(self.blocks)

    @property
    def cost(self) -> int:
        """Multiplications of one Newton-Schulz iteration of one period."""
        total = 0
        for height in self.blocks:
            small, large = sorted((height, self.columns))
            total += small * small * (2 * large + small)
        return total

    def home(self, place: int) -> Span:
        """The rows of whole periods that a place holds all by itself."""
        start, stop = self.spans[place]
        first, last = -(-start // self.period), stop // self.period
        return (first * self.period, max(first, last) * self.period)

    def shared(self) -> list[int]:
        """The periods that lie across places."""
        edges = {edge for span in self.spans if span[0] < span[1] for edge in span}
        return sorted({edge // self.period for edge in edges if edge % self.period})

    def parts(self, period: int) -> list[tuple[int, Span]]:
        """Who holds which rows of one period."""
        low, high = period * self.period, (period + 1) * self.period
        cut = [(p, (max(a, low), min(b, high))) for p, (a, b) in enumerate(self.spans)]
        return [(place, span) for place, span in cut if span[0] < span[1]]


@dataclass(frozen=True)
class Unit:
    """One period that lies across places, and who computes it."""

    parameter: int
    period: int
    owner: int


def rows_of(parameter: MuonParameter, piece: Piece) -> Rows:
    """The rows of `parameter`, whose whole shape and spans `piece` tells."""
    *_, columns = piece.shape
    height = 1 if len(piece.shape) == 2 else piece.shape[1]
    spans = tuple((a * height, b * height) for a, b in piece.spans)
    return Rows(spans, parameter.rows, columns)


def assign_owners(rows: Sequence[Rows], num_places: int) -> list[Unit]:
    """An owner for every shared period, heaviest first."""
    loads = [0] * num_places
    for one in rows:
        for place in range(num_places):
            start, stop = one.home(place)
            loads[place] += (stop - start) // one.period * one.cost
    shared = [(one.cost, i, period) for i, one in enumerate(rows) for period in one.shared()]
    queue = [(load, place) for place, load in enumerate(loads)]
    heapq.heapify(queue)
    units = []
    for cost, index, period in sorted(shared, key=lambda s: (-s[0], s[1], s[2])):
        load, place = queue[0]
        heapq.heapreplace(queue, (load + cost, place))
        units.append(Unit(index, period, place))
    return units


def buckets_of(
    units: Sequence[Unit], rows: Sequence[Rows], num_places: int, limit: int
) -> list[list[Unit]]:
    """The units in rounds in which no owner fetches more than `limit` elements, or one unit."""
    rounds: list[list[Unit]] = []
    at, filled = [0] * num_places, [0] * num_places
    for unit in units:
        size = rows[unit.parameter].period * rows[unit.parameter].columns
        if filled[unit.owner] and filled[unit.owner] + size > limit:
            at[unit.owner] += 1
            filled[unit.owner] = 0
        filled[unit.owner] += size
        if at[unit.owner] == len(rounds):
            rounds.append([])
        rounds[at[unit.owner]].append(unit)
    return rounds
