"""The experts' work on one rank's rows: own experts first, then the redundant ones (eq. 11).

The router weight multiplies here, where the row is, so that the copies of a token can be added
before they travel back. The backward pass recomputes everything from the rows: with y = p E(x) the
router's gradient is <dy, E(x)>.

Legend: N rows, L latent width, F inner width, B experts a rank owns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from openk3.ops import moe
from openk3.ops.precision import wide_dtype
from openk3.parallel.moonep.transport import Pending, Route


class RowGrads(NamedTuple):
    """Gradients of one layer on one rank."""

    rows: Tensor
    """[N, L]."""
    weights: Tensor
    """[N] float32."""
    own: list[Tensor]
    """Of w1, w3, w2 [B, ..], in at least float32."""


Betas = tuple[float, float | None]


def forward(
    rows: Tensor, route: Route, own: list[Tensor], copies: list[Tensor], ready: Pending,
    betas: Betas,
) -> Tensor:  # fmt: skip
    """rows [N, L] grouped by expert -> weighted outputs [N, L].

    own, copies: w1, w3, w2 of own and of redundant experts; the latter to be read once `ready`.
    """
    mine, borrowed = _cut(rows, route)
    first = _mlp(mine, route.ends[: len(own[0])], own, betas)
    ready.wait()
    last = _mlp(borrowed, _borrowed_ends(route, copies), copies, betas)
    return _weigh(torch.cat([first, last]), route.weights)


def backward(
    rows: Tensor, d_out: Tensor, route: Route, own: list[Tensor], copies: list[Tensor],
    ready: Pending, staged: list[Tensor], betas: Betas,
) -> RowGrads:  # fmt: skip
    """Gradients for d_out [N, L]; those of the redundant experts go to `staged`."""
    ready.wait()
    leaves = [t.detach().requires_grad_() for t in (rows, route.weights, *own)]
    loans = [t.detach().requires_grad_() for t in copies]
    with torch.enable_grad():
        mine, borrowed = _cut(leaves[0], route)
        first = _mlp(mine, route.ends[: len(own[0])], leaves[2:], betas)
        last = _mlp(borrowed, _borrowed_ends(route, copies), loans, betas)
        out = _weigh(torch.cat([first, last]), leaves[1])
    grads = torch.autograd.grad(
        out, [*leaves, *loans], d_out, allow_unused=True, materialize_grads=True
    )
    for room, grad in zip(staged, grads[len(leaves) :], strict=True):
        room.copy_(grad)
    d_rows, d_weights, *d_own = grads[: len(leaves)]
    return RowGrads(d_rows, d_weights, [g.to(wide_dtype(g)) for g in d_own])


def _cut(rows: Tensor, route: Route) -> tuple[Tensor, Tensor]:
    num_own = _rows_of_own(route)
    return rows[:num_own], rows[num_own:]


def _rows_of_own(route: Route) -> int:
    assert route.num_own is not None, "this path splits the rows on the host"
    return route.num_own


def _borrowed_ends(route: Route, copies: list[Tensor]) -> Tensor:
    block = route.layout.block
    return route.ends[block : block + len(copies[0])] - _rows_of_own(route)


def _mlp(rows: Tensor, ends: Tensor, experts: list[Tensor], betas: Betas) -> Tensor:
    if not len(rows):
        return rows  # grouped products want at least one row
    w1, w3, w2 = experts
    return moe.grouped_mlp(rows, ends, w1, w3, w2, *betas)


def _weigh(y: Tensor, weights: Tensor) -> Tensor:
    return (y.to(wide_dtype(y)) * weights[:, None]).to(y.dtype)
