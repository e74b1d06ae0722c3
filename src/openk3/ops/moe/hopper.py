"""Launches of the warp-specialised products for Hopper GPUs; the interpreter cannot run these.

Legend: R padded rows, E experts, L latent width, F inner width.
"""

from typing import Any

import torch
from torch import Tensor

from openk3.ops.moe.row_plan import Plan
from openk3.ops.triton_support import capability, has_gluon, launch, num_sms

BK = 64
STAGES = {2: 4, 3: 3}
"""Stages that fit into shared memory, by the tallest tile."""


def hopper_takes(x: Tensor, *widths: int) -> bool:
    """Whether these kernels run for bfloat16 x and matrices of these widths."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or any(width % 64 for width in widths):
        return False
    return capability(x.device)[0] == 9 and has_gluon()


def _descriptor(x: Tensor, *block: int) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout: Any = gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)


def one_matrix(w: Tensor) -> Tensor:
    """w [E, M, N], perhaps a slice of a taller [E, M', N], as one matrix over the same memory."""
    num_experts, rows, width = w.shape
    assert w.stride()[1:] == (width, 1), f"rows of {list(w.stride())} are not contiguous"
    height = (num_experts - 1) * (w.stride(0) // width) + rows
    return torch.as_strided(w, (height, width), (width, 1))


def _launch(
    out: Tensor, x: Tensor, w: Tensor, plan: Plan, *, K: int,
    x2: Tensor | None = None, w2: Tensor | None = None,
    kept: tuple[Tensor, Tensor] | None = None, betas: tuple[float, float | None] = (1.0, None),
    pair: bool = False, transposed: bool = False,
) -> None:  # fmt: skip
    """`hopper_kernels.grouped_product`; kept: where to leave both products that SiTU is made of."""
    from openk3.ops.moe import hopper_kernels as kernels

    height = max(2, plan.tallest)
    rows = _descriptor(x, 64, BK)
    block = (128, BK) if transposed else (BK, 128)
    weights = _descriptor(one_matrix(w), *block)
    to = _descriptor(out, 64, 128)
    gate, up = (to, to) if kept is None else (_descriptor(t, 64, 128) for t in kept)
    counter = torch.zeros(1, dtype=torch.int32, device=x.device)
    launch(
        kernels.grouped_product, (num_sms(x.device),), rows,
        rows if x2 is None else _descriptor(x2, 64, BK), weights,
        weights if w2 is None else _descriptor(one_matrix(w2), *block),
        to, gate, up, plan.tiles[:3], plan.tiles.num_tiles, counter, betas[0], betas[1] or 0.0,
        PITCH=w.stride(0) // w.shape[2], K=K, N=out.shape[1], BK=BK, S=STAGES[height], H=height,
        PAIR=pair, DUAL=x2 is not None, TRANSPOSED=transposed, SAVE=kept is not None,
        CAP=betas[1] is not None, num_warps=4,
    )  # fmt: skip


def situ_product(
    x: Tensor, w1: Tensor, w3: Tensor, plan: Plan, beta1: float, beta2: float | None, *,
    save: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """x [R, L], w1, w3 [E, F, L] -> (SiTU(x w1^T, x w3^T) [R, F]; if `save`, both [R, 2 F])."""
    _, inner, latent = w1.shape
    act = x.new_empty(x.shape[0], inner)
    both = x.new_empty(x.shape[0], 2 * inner) if save else None
    _launch(
        act, x, w1, plan, K=latent, w2=w3, pair=True,
        kept=None if both is None else (both[:, :inner], both[:, inner:]), betas=(beta1, beta2),
        transposed=True,
    )  # fmt: skip
    return act, both


def rows_product(x: Tensor, w: Tensor, plan: Plan, *, transposed: bool) -> Tensor:
    """x w_e^T (`transposed`, w [E, N, K]) or x w_e (w [E, K, N]) of each expert's rows: [R, N]."""
    out = x.new_empty(x.shape[0], w.shape[1] if transposed else w.shape[2])
    _launch(out, x, w, plan, K=x.shape[1], transposed=transposed)
    return out


def rows_product_sum(x: Tensor, w: Tensor, x2: Tensor, w2: Tensor, plan: Plan) -> Tensor:
    """x w_e + x2 w2_e of each expert's rows; w, w2 [E, K, N] -> [R, N]."""
    out = x.new_empty(x.shape[0], w.shape[2])
    _launch(out, x, w, plan, K=2 * x.shape[1], x2=x2, w2=w2)
    return out


def weight_grad(a: Tensor, b: Tensor, plan: Plan) -> Tensor:
    """a [R, M], b [R, N] -> a_e^T b_e [E, M, N]; exactly zero for an expert without rows."""
    from openk3.ops.moe import hopper_grad_kernels

    num_experts, height = plan.ends.shape[0], max(2, plan.tallest)
    out = a.new_empty(num_experts, a.shape[1], b.shape[1])
    launch(
        hopper_grad_kernels.grouped_weight_grad, (num_sms(a.device),), _descriptor(a, BK, 64),
        _descriptor(b, BK, 128),
        _descriptor(out.view(-1, b.shape[1]), 64, 128), plan.order, plan.starts, plan.ends,
        M=a.shape[1], N=b.shape[1], E=num_experts, BK=BK, S=STAGES[height], H=height, GROUP=8,
        num_warps=4,
    )  # fmt: skip
    return out
