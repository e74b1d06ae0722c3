"""Matrix products over rows grouped by expert: our kernels, and torch's `grouped_mm`.

Both take the same plan; ours need an alignment of 64: the warp-specialised ones of `hopper.py`
where they run, else the portable Triton ones of this file, which the interpreter runs too. Which is
faster for which product on which GPU is measured (benchmarks/moe.py) and written in `costs.py`.

Legend: R rows, E experts, L latent width, F inner width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from openk3.ops.moe import grouped_kernels as kernels
from openk3.ops.moe import hopper
from openk3.ops.moe.row_plan import UNIT, Plan
from openk3.ops.triton_support import launch, num_sms, power_of_two


class Tile(NamedTuple):
    """Shape and pipeline of one kernel, for numbers of two bytes; wider ones get less depth."""

    bn: int
    bk: int
    num_warps: int
    num_stages: int
    flat: bool = True

    def depth(self, x: Tensor) -> int:
        """bk for numbers like x's."""
        return 2 * self.bk // x.element_size()


SITU_TILE = Tile(128, 64, 8, 4, flat=False)
ROWS_TILE = Tile(256, 64, 8, 3)
GRAD_TILE = Tile(256, 64, 8, 4)


def descriptor(x: Tensor, block: tuple[int, int]) -> Any:
    """x [M, N] for the tensor memory accelerator, in blocks."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


def _precision(x: Tensor) -> str:
    """Of products on tensor cores: float32 numbers are taken apart, not rounded."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def _rows_of_tile(plan: Plan) -> int:
    return UNIT * power_of_two(plan.tallest)


def situ_product(
    x: Tensor,
    w1: Tensor,
    w3: Tensor,
    plan: Plan,
    beta1: float,
    beta2: float | None,
    *,
    save: bool,
    tile: Tile = SITU_TILE,
) -> tuple[Tensor, Tensor | None]:
    """x [R, L], w1, w3 [E, F, L] -> (SiTU(x w1^T, x w3^T) [R, F]; if `save`: its inputs)."""
    _, inner, latent = w1.shape
    act = x.new_empty(x.shape[0], inner)
    gate_up = x.new_empty(x.shape[0], 2 * inner) if save else None
    rows, depth = _rows_of_tile(plan), tile.depth(x)
    weights = [descriptor(hopper.one_matrix(w), (tile.bn, depth)) for w in (w1, w3)]
    launch(
        kernels.grouped_situ, (num_sms(x.device),),
        descriptor(x, (rows, depth)), *weights, act, gate_up,
        tuple(plan.tiles[:3]), plan.tiles.num_tiles, beta1, beta2 or 0.0,
        PITCH=w1.stride(0) // latent, K=latent, N=inner, BM=rows, BN=tile.bn, BK=depth,
        SAVE=save, CAP=beta2 is not None, FLAT=tile.flat and x.is_cuda, ASM=x.is_cuda,
        PRECISION=_precision(x),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return act, gate_up


def rows_product(
    x: Tensor, w: Tensor, plan: Plan, *, transposed: bool, out: Tensor | None = None,
    tile: Tile = ROWS_TILE,
) -> Tensor:  # fmt: skip
    """x w_e^T (`transposed`, w [E, N, K]) or x w_e (w [E, K, N]) of each expert's rows: [R, N].

    With `out` only the rows of the plan's experts change there.
    """
    num_experts, rows_w, cols_w = w.shape
    out_width = rows_w if transposed else cols_w
    out = x.new_empty(x.shape[0], out_width) if out is None else out
    rows, depth = _rows_of_tile(plan), tile.depth(x)
    block = (tile.bn, depth) if transposed else (depth, tile.bn)
    flat = w.view(num_experts * rows_w, cols_w)
    launch(
        kernels.grouped_rows, (num_sms(x.device),),
        descriptor(x, (rows, depth)), descriptor(flat, block), out,
        tuple(plan.tiles[:3]), plan.tiles.num_tiles,
        K=x.shape[1], N=out_width, BM=rows, BN=tile.bn, BK=depth,
        TRANSPOSED=transposed, FLAT=tile.flat and x.is_cuda, PRECISION=_precision(x),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def weight_grad(
    a: Tensor, b: Tensor, plan: Plan, *, out: Tensor | None = None, zero: bool = True,
    tile: Tile = GRAD_TILE,
) -> Tensor:  # fmt: skip
    """a [R, M], b [R, N] -> a_e^T b_e [E, M, N] in `out`'s dtype, else a's.

    Exactly zero for an expert without rows, or left as it was unless `zero`.
    """
    num_experts, depth = plan.ends.shape[0], tile.depth(a)
    out = a.new_empty(num_experts, a.shape[1], b.shape[1]) if out is None else out
    launch(
        kernels.grouped_weight_grad, (num_sms(a.device),),
        descriptor(a, (depth, 2 * UNIT)), descriptor(b, (depth, tile.bn)), out,
        plan.order, plan.starts, plan.ends,
        M=a.shape[1], N=b.shape[1], E=num_experts, BM=2 * UNIT, BN=tile.bn, BK=depth,
        GROUP=8, ZERO=zero, PRECISION=_precision(a),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


class TorchProducts:
    """`grouped_mm`, for rows of any alignment. x, a, b [R, width]; w [E, N, K] or [E, K, N]."""

    @staticmethod
    def rows(x: Tensor, w: Tensor, plan: Plan, *, transposed: bool) -> Tensor:
        w = w.transpose(1, 2) if transposed else w
        return functional.grouped_mm(x, w, offs=plan.ends)

    @staticmethod
    def sum_of_rows(x: Tensor, w: Tensor, x2: Tensor, w2: Tensor, plan: Plan) -> Tensor:
        return functional.grouped_mm(x, w, offs=plan.ends).add_(
            functional.grouped_mm(x2, w2, offs=plan.ends)
        )

    @staticmethod
    def weight_grad(a: Tensor, b: Tensor, plan: Plan) -> Tensor:
        return functional.grouped_mm(a.t(), b, offs=plan.ends)


class TritonProducts:
    """Our kernels, for a plan of alignment 64; arguments as of the functions above."""

    @staticmethod
    def situ(
        x: Tensor, w1: Tensor, w3: Tensor, plan: Plan, betas: tuple[float, float | None], save: bool
    ) -> tuple[Tensor, Tensor | None]:
        make = hopper.situ_product if hopper.hopper_takes(x, *w1.shape[1:]) else situ_product
        return make(x, w1, w3, plan, *betas, save=save)

    @staticmethod
    def rows(x: Tensor, w: Tensor, plan: Plan, *, transposed: bool) -> Tensor:
        make = hopper.rows_product if hopper.hopper_takes(x, *w.shape[1:]) else rows_product
        return make(x, w, plan, transposed=transposed)

    @staticmethod
    def sum_of_rows(x: Tensor, w: Tensor, x2: Tensor, w2: Tensor, plan: Plan) -> Tensor:
        """x w_e + x2 w2_e."""
        if hopper.hopper_takes(x, *w.shape[1:]):
            return hopper.rows_product_sum(x, w, x2, w2, plan)
        first = rows_product(x, w, plan, transposed=False)
        return first.add_(rows_product(x2, w2, plan, transposed=False))

    @staticmethod
    def weight_grad(a: Tensor, b: Tensor, plan: Plan) -> Tensor:
        takes = hopper.hopper_takes(a, a.shape[1], b.shape[1])
        return (hopper.weight_grad if takes else weight_grad)(a, b, plan)


def joined(w1: Tensor, w3: Tensor) -> Tensor | None:
    """[E, 2 F, L] over the memory of w1 and w3 [E, F, L] if w3's rows follow w1's, else None."""
    num_experts, inner, latent = w1.shape
    stride = (2 * inner * latent, latent, 1)
    after = w3.data_ptr() - w1.data_ptr() == inner * latent * w1.element_size()
    if not after or w1.stride() != stride or w3.stride() != stride:
        return None
    return torch.as_strided(w1, (num_experts, 2 * inner, latent), stride)
