"""The experts' products where nothing is known to the host: fixed shapes, tables on the device.

Rows of own and of redundant experts share one buffer but not one weight tensor. Own rows come
first, so `grouped_mm` takes them as they are; tiles of our kernels then fill in the rows of
redundant experts. Weight gradients are written in float32. As in `ops.moe.routed`, with y = p E(x),
the router's gradient is <dy w2, act>, taken from the un-scaled gradient.

Legend: N rows, L latent width, F inner width, B experts a rank owns.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from openk3.ops.moe import grouped, routed
from openk3.ops.moe.row_plan import UNIT, Plan, Shape, tile_experts
from openk3.ops.triton_support import power_of_two
from openk3.parallel.moonep.products import Betas, RowGrads
from openk3.parallel.moonep.transport import Pending, Route

ALIGN = UNIT
"""Rows of a group: tiles never straddle two experts."""


class Halves(NamedTuple):
    """Both groups of experts on one rank's rows."""

    own: Plan
    borrowed: Plan
    last_row: Tensor
    """[1] int32: rows in use."""


def halves(sizes: Tensor, num_rows: int) -> Halves:
    """sizes [2 B] multiples of ALIGN: rows of each own, then of each redundant expert."""
    block = sizes.numel() // 2
    own, borrowed = (_tile(part, num_rows) for part in (sizes[:block], sizes[block:]))
    start = own.ends[-1:]
    tiles = borrowed.tiles._replace(row=borrowed.tiles.row + start)
    borrowed = borrowed._replace(
        starts=borrowed.starts + start, ends=borrowed.ends + start, tiles=tiles
    )
    return Halves(own, borrowed, borrowed.ends[-1:])


def _tile(sizes: Tensor, num_rows: int) -> Plan:
    """Row tiles of groups that lie one after the other from row 0."""
    num, shape = sizes.numel(), Shape()
    totals = functional.pad(sizes.to(torch.int32), (0, power_of_two(num, 16) - num))
    none = totals.new_empty(1)
    starts, ends, order, tiles = tile_experts(totals, num, none, num_rows, 1, shape)
    return Plan(none, none, starts, ends, totals, order, tiles, 1, len(shape.heights))


def forward(
    rows: Tensor, route: Route, own: list[Tensor], copies: list[Tensor], ready: Pending,
    betas: Betas,
) -> Tensor:  # fmt: skip
    """As `products.forward`; rows past the last group are left unset."""
    if not len(rows):
        ready.wait()
        return rows
    plan = halves(route.ends.diff(prepend=route.ends.new_zeros(1)), len(rows))
    ready.wait()
    gate, up = (_product(rows, own[i], copies[i], plan, True) for i in (0, 1))
    act = routed.situ_forward(gate, up, routed.Betas(*betas), plan.last_row)
    y = _product(act, own[2], copies[2], plan, True)
    return (y.float() * route.weights[:, None]).to(y.dtype)


def backward(
    rows: Tensor, d_out: Tensor, route: Route, own: list[Tensor], copies: list[Tensor],
    ready: Pending, staged: list[Tensor], betas: Betas,
) -> RowGrads:  # fmt: skip
    """As `products.backward`."""
    if not len(rows):
        ready.wait()
        return RowGrads(
            rows, route.weights, [torch.zeros_like(w, dtype=torch.float32) for w in own]
        )
    plan = halves(route.ends.diff(prepend=route.ends.new_zeros(1)), len(rows))
    ready.wait()
    gate, up = (_product(rows, own[i], copies[i], plan, True) for i in (0, 1))
    act = _product(d_out, own[2], copies[2], plan, False)
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    d_weights = routed.situ_backward(
        gate, up, act, d_gate, d_up, routed.Betas(*betas), route.weights, plan.last_row
    )
    assert d_weights is not None, "weighted rows return their gradient"
    del gate, up
    grads = [torch.empty_like(w, dtype=torch.float32) for w in own]
    pairs = (d_gate, rows), (d_up, rows), (d_out, act)
    for (a, b), mine, lent in zip(pairs, grads, staged, strict=True):
        grouped.weight_grad(a, b, plan.own, out=mine)
        if len(lent):
            grouped.weight_grad(a, b, plan.borrowed, out=lent, zero=False)
    d_rows = _product(d_gate, own[0], copies[0], plan, False)
    d_rows += _product(d_up, own[1], copies[1], plan, False)
    return RowGrads(d_rows, d_weights, grads)


def _product(rows: Tensor, own: Tensor, copies: Tensor, plan: Halves, transposed: bool) -> Tensor:
    w = own.detach()
    out = functional.grouped_mm(rows, w.transpose(1, 2) if transposed else w, offs=plan.own.ends)
    if len(copies):
        grouped.rows_product(rows, copies, plan.borrowed, transposed=transposed, out=out)
    return out
