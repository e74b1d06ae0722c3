"""Sort (token, choice) pairs by expert on the device, and move rows there and back.

No value ever reaches the host: buffers have the static size T k + E (align - 1).
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from openk3.ops.moe import permute_kernels as kernels
from openk3.ops.triton_support import launch, num_sms, power_of_two

UNIT = 64
"""Tiles have a height of some units of rows; our kernels want experts to start at a multiple."""


class Tiles(NamedTuple):
    """Row tiles, an expert's one after another, largest experts first; int32."""

    expert: Tensor
    row: Tensor
    """First row, a multiple of UNIT, plus the height in units."""
    group: Tensor
    """The tiles of the same expert that sweep over the columns together with this one: the first
    one's place in the list times 64, plus their number."""
    num_tiles: Tensor
    """[1]: entries in use."""


class Plan(NamedTuple):
    """Where the rows of one batch lie."""

    row_of_pair: Tensor
    """[T k] int32: the row of flat choice t k + j."""
    row_pair: Tensor
    """[R] int32: its inverse; -1 on an expert's padding rows; unset past the last expert's end."""
    starts: Tensor
    """[E] int32."""
    ends: Tensor
    """[E] int32, padding included; what `grouped_mm` calls offs."""
    counts: Tensor
    """[E] int32 pairs of each expert."""
    order: Tensor
    """[E] int32 experts by falling count."""
    tiles: Tiles
    top_k: int
    tallest: int
    """The greatest height of a tile in units."""

    def tensors(self) -> tuple[Tensor, ...]:
        """All tables, for autograd to keep; `unflatten_plan` puts them together again."""
        return (
            self.row_of_pair, self.row_pair, self.starts, self.ends, self.counts, self.order,
            *self.tiles,
        )  # fmt: skip

    @property
    def last_row(self) -> Tensor:
        """[1]: the number of rows in use."""
        return self.ends[-1:]

    @property
    def num_rows(self) -> int:
        """R, the static bound."""
        return self.row_pair.shape[0]


def unflatten_plan(tensors: Sequence[Tensor], top_k: int, tallest: int) -> Plan:
    """The plan whose `tensors()` these are."""
    row_of_pair, row_pair, starts, ends, counts, order, *tiles = tensors
    return Plan(row_of_pair, row_pair, starts, ends, counts, order, Tiles(*tiles), top_k, tallest)


@cache
def best_splits(heights: tuple[float, ...]) -> tuple[int, ...]:
    """The cheapest tiles for each number r of units below twice the greatest height.

    heights[h - 1]: time of a tile of h units. Entry r holds the number of tiles of height h in its
    digit h of base 8.
    """
    best: list[tuple[float, int]] = [(0.0, 0)]
    for rest in range(1, 2 * len(heights)):
        options = range(1, min(rest, len(heights)) + 1)
        best.append(
            min((best[rest - h][0] + heights[h - 1], best[rest - h][1] + 8**h) for h in options)
        )
    return tuple(split for _, split in best)


class Shape(NamedTuple):
    """What the device splits an expert's rows by; `costs` has it for each GPU type."""

    heights: tuple[float, ...] = (0.6, 1.0)
    """Time of a tile of 1, 2, ... units of rows, over that of the tallest one."""
    group: int = 16
    """Most row tiles of an expert that sweep over the columns together."""


def tile_experts(
    totals: Tensor, num_experts: int, row_pair: Tensor, num_rows: int, align: int, shape: Shape
) -> tuple[Tensor, Tensor, Tensor, Tiles]:
    """totals [a power of two of 16 or more] int32 rows of each expert -> (starts, ends, order,
    tiles), experts one after the other from row 0, each from a multiple of `align` on.

    num_rows: bound of their sum. Entries of row_pair on padding rows become -1 where align > 1.
    """

    def ints(number: int) -> Tensor:
        return totals.new_empty(number)

    starts, ends, order, first_tile = (ints(num_experts) for _ in range(4))
    bound = num_rows // UNIT + num_experts
    tiles = Tiles(ints(bound), ints(bound), ints(bound), ints(1))
    splits = best_splits(shape.heights)
    launch(
        kernels.plan_experts, (1,), totals, starts, ends, order, first_tile, tiles.num_tiles,
        E=num_experts, E_PAD=totals.shape[0], ALIGN=align, SPLITS=splits,
        num_warps=8 if totals.shape[0] > 256 else 4,
    )  # fmt: skip
    launch(
        kernels.list_tiles, (num_experts,), totals, starts, ends, first_tile, *tiles[:3], row_pair,
        ALIGN=align, SPLITS=splits, GROUP=shape.group, W=64, num_warps=1,
    )  # fmt: skip
    return starts, ends, order, tiles


def make_plan(ids: Tensor, num_experts: int, *, align: int = 1, shape: Shape | None = None) -> Plan:
    """ids [T, k] integers in [0, num_experts) -> the stable expert-sorted layout.

    `align`: every expert's rows start at a multiple of it.
    """
    shape = shape or Shape()
    pairs = ids.numel()
    block = 1024 if ids.is_cuda else 32  # the interpreter sorts slowly
    blocks = max(1, -(-pairs // block))
    e_pad = power_of_two(num_experts, 16)

    def ints(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=ids.device)

    ids = ids.contiguous()
    counts, before, totals = ints(blocks, e_pad), ints(blocks, e_pad), ints(e_pad)
    row_of_pair, row_pair = ints(pairs), ints(pairs + num_experts * (align - 1))
    sizes = {"B": block, "E_PAD": e_pad}
    launch(kernels.count_blocks, (blocks,), ids, counts, before, pairs, **sizes, num_warps=8)
    launch(
        kernels.sum_blocks, (e_pad // 16,), counts, totals, blocks, E_PAD=e_pad, W=16, NB=128,
        num_warps=4,
    )  # fmt: skip
    starts, ends, order, tiles = tile_experts(
        totals, num_experts, row_pair, len(row_pair), align, shape
    )
    launch(
        kernels.place_pairs, (blocks,), ids, counts, before, starts, row_of_pair, row_pair, pairs,
        **sizes, num_warps=8,
    )  # fmt: skip
    return Plan(
        row_of_pair, row_pair, starts, ends, totals[:num_experts], order, tiles, ids.shape[-1],
        len(shape.heights),
    )  # fmt: skip


def gather_rows(x: Tensor, plan: Plan, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (rows [R, K], row weights [R] float32 of weights [T, k], or an empty tensor)."""
    width = x.shape[1]
    out = x.new_empty(plan.num_rows, width)
    row_weight = x.new_empty(plan.num_rows if weights is not None else 0, dtype=torch.float32)
    if x.shape[0]:
        rows = 2 if x.is_cuda else 64
        grid = min(-(-plan.num_rows // rows), 16 * num_sms(x.device))
        launch(
            kernels.gather_rows, (grid,), x, weights, plan.row_pair, out, row_weight,
            plan.last_row, TOP_K=plan.top_k, K=width, BR=rows, BC=_block(width),
            WEIGHTS=weights is not None, num_warps=4,
        )  # fmt: skip
    return out, row_weight


def combine_rows(y: Tensor, plan: Plan, num_tokens: int, weights: Tensor | None = None) -> Tensor:
    """y [R, N] -> [T, N] in y's dtype: the (weighted) sum of each token's rows, float32 inside."""
    out = y.new_empty(num_tokens, y.shape[1])
    block = min(512, _block(y.shape[1]))
    if num_tokens:
        launch(
            kernels.combine_rows, (num_tokens, -(-y.shape[1] // block)), y, plan.row_of_pair,
            weights, out, TOP_K=plan.top_k, N=y.shape[1], BLOCK=block,
            WEIGHTED=weights is not None, num_warps=4 if block >= 512 else 1,
        )  # fmt: skip
    return out


def pick_pairs(values: Tensor, plan: Plan) -> Tensor:
    """values [R] of rows -> [T, k] of pairs."""
    pairs = plan.row_of_pair.numel()
    out = values.new_empty(pairs // plan.top_k, plan.top_k)
    if pairs:
        launch(
            kernels.pick_pairs, (-(-pairs // 1024),), values, plan.row_of_pair, out, pairs,
            B=1024, num_warps=4,
        )  # fmt: skip
    return out


def _block(width: int) -> int:
    return min(1024, power_of_two(width))
