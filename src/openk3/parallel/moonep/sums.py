"""Sums of rows that share a target, in float32 and in a fixed order on every device."""

from typing import NamedTuple

import torch
from torch import Tensor

from openk3.ops.precision import wide_dtype
from openk3.ops.triton_support import has_triton, launch, power_of_two


class Groups(NamedTuple):
    """Which rows are added together."""

    target: Tensor
    """[n] int64: where row i goes."""
    order: Tensor
    """[n] int64: rows by target, stable."""
    starts: Tensor
    """[m + 1] int64: where each target's rows begin in `order`."""

    @property
    def num_targets(self) -> int:
        return self.starts.numel() - 1


def group(target: Tensor, num_targets: int) -> Groups:
    """target [n] int64 in [0, num_targets)."""
    order = target.argsort(stable=True)
    edges = torch.arange(num_targets + 1, device=target.device)
    return Groups(target, order, torch.searchsorted(target[order], edges))


def add_up(rows: Tensor, groups: Groups) -> Tensor:
    """rows [n, L] -> [m, L] in rows' dtype: the sum of each target's rows."""
    if rows.is_cuda and has_triton():
        return _add_up_on_gpu(rows, groups)
    total = rows.new_zeros(groups.num_targets, rows.shape[1], dtype=wide_dtype(rows))
    return total.index_add_(0, groups.target, rows.to(total.dtype)).to(rows.dtype)


def block_of(width: int) -> int:
    """Columns that one program takes of rows of `width`."""
    return min(1024, power_of_two(width))


def _add_up_on_gpu(rows: Tensor, groups: Groups) -> Tensor:
    """`index_add_` would add in any order there."""
    from openk3.parallel.moonep import kernels

    out = rows.new_empty(groups.num_targets, rows.shape[1])
    if out.numel():
        block = block_of(rows.shape[1])
        launch(
            kernels.add_rows, (len(out), -(-rows.shape[1] // block)), rows, groups.order,
            groups.starts, out, L=rows.shape[1], BLOCK=block, ZERO=True,
        )  # fmt: skip
    return out
