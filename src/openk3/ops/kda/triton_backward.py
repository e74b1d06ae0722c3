"""Backward of the Triton KDA kernels: the scan of dS, then the gradients of each 64-token block."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from openk3.ops.kda.segments import BLOCK
from openk3.ops.kda.triton_forward import Saved, Scratch, fold, prepare
from openk3.ops.kda.triton_grads import grads_kernel
from openk3.ops.kda.triton_pairs import pairs_kernel
from openk3.ops.kda.triton_problem import TILE, TUNING, Inputs, Problem, strides
from openk3.ops.kda.triton_scan import scan_backward_kernel
from openk3.ops.triton_support import launch_named


class Gradients(NamedTuple):
    """By rows, as Inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor | None
    initial: Tensor | None


def backward(
    x: Inputs,
    p: Problem,
    saved: Saved,
    o: Tensor,
    d_o: Tensor,
    d_final: Tensor | None,
    *,
    need_initial: bool,
) -> Gradients:
    """o [rows, H, D] dense, d_o [rows, H, D], d_final [N, H, K, V] dense or None."""
    new = {"dtype": torch.float32, "device": x.q.device}
    norms = torch.empty(p.rows, p.heads, 2, **new)
    scratch = prepare(x, p, norms)
    dv = torch.empty(p.rows, p.heads, p.dim, dtype=x.v.dtype, device=x.q.device)
    d_initial, ends = _scan_backward(x, p, saved, scratch, d_o, d_final, dv, need_initial)
    gamma = scratch.gamma
    del scratch
    pairs, sums, d_beta = _pairs(x, p, saved, o, d_o, dv)
    dq, dk, dg = (
        torch.empty(p.rows, p.heads, p.dim, dtype=t.dtype, device=t.device) for t in (x.q, x.k, x.g)
    )
    d_bias = torch.zeros(p.slots(BLOCK), p.heads, p.dim, **new)
    d_A_log = torch.zeros(p.slots(BLOCK), p.heads, **new)
    launch_named(
        grads_kernel,
        (p.slots(BLOCK) * p.heads,),
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        u=saved.u,
        d_o=d_o,
        dv=dv,
        pairs=pairs,
        sums=sums,
        norms=norms,
        gamma=gamma,
        ones=lower_ones(p.operand, x.q.device),
        starts=saved.checkpoints,
        ends=ends,
        dq=dq,
        dk=dk,
        dg=dg,
        d_bias=d_bias,
        d_A_log=d_A_log,
        scale=x.scale,
        lower_bound=x.lower_bound,
        **x.rows("q", "k", "g"),
        **strides(o=d_o),
        L=BLOCK,
        BK=min(TUNING.column_width, p.dim),
        HAS_BIAS=x.dt_bias is not None,
        **p.common(x),
        **TUNING.grads,
    )
    bias = None if x.dt_bias is None else d_bias.sum(0) * x.A_log.exp()[:, None]
    return Gradients(dq, dk, dv, dg, d_beta, d_A_log.sum(0), bias, d_initial)


def _scan_backward(
    x: Inputs,
    p: Problem,
    saved: Saved,
    scratch: Scratch,
    d_o: Tensor,
    d_final: Tensor | None,
    dv: Tensor,
    need_initial: bool,
) -> tuple[Tensor | None, Tensor]:
    """Fills dv. -> gradient of the initial state or None, and of the state at each block's end."""
    new = {"dtype": torch.float32, "device": x.q.device}
    square = (p.heads, p.dim, p.dim)
    d_initial = torch.empty(p.num_seqs, *square, **new) if need_initial else None
    ends = torch.empty(p.slots(BLOCK), *square, dtype=p.operand, device=x.q.device)
    carry = torch.empty(p.segments.num_slots, *square, **new) if p.segments.split else None

    def scan(summary: bool) -> None:
        launch_named(
            scan_backward_kernel,
            (p.segments.num_slots * p.heads * (p.dim // p.v_rows),),
            d_o=d_o,
            **scratch._asdict(),
            d_final=d_final,
            carry=carry,
            dv=dv,
            d_initial=d_initial,
            checkpoints=ends,
            segment=p.segments.length,
            **strides(o=d_o),
            C=TILE,
            BLOCK=BLOCK,
            V_ROWS=p.v_rows,
            SPLIT=p.segments.split,
            SUMMARY=summary,
            HAS_FINAL=d_final is not None,
            HAS_INITIAL=need_initial,
            **p.common(x),
            **TUNING.backward,
        )

    if p.segments.split:
        scan(summary=True)
        fold(p, x.cu, carry, saved.transition, reverse=True)
    scan(summary=False)
    return d_initial, ends


def _pairs(
    x: Inputs, p: Problem, saved: Saved, o: Tensor, d_o: Tensor, dv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """X and Z of every block, the row sums of the L2 norms, and d_beta."""
    device = x.q.device
    pairs = torch.empty(p.slots(BLOCK), p.heads, 2, BLOCK, BLOCK, dtype=p.operand, device=device)
    sums = torch.empty(p.rows, p.heads, 2, dtype=torch.float32, device=device)
    d_beta = torch.empty(p.rows, p.heads, dtype=x.beta.dtype, device=device)
    launch_named(
        pairs_kernel,
        (p.slots(BLOCK) * p.heads,),
        u=saved.u,
        o=o,
        d_o=d_o,
        dv=dv,
        pairs=pairs,
        sums=sums,
        d_beta=d_beta,
        **x.rows("v", "beta"),
        **strides(o=d_o),
        L=BLOCK,
        **p.common(x),
        **TUNING.pairs,
    )
    return pairs, sums, d_beta


@lru_cache
def lower_ones(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[64, 64] of ones on and below the diagonal: a running sum as a matrix product."""
    return torch.ones(BLOCK, BLOCK, dtype=dtype, device=device).tril()
