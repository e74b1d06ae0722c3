"""Forward of the Triton KDA kernels: tiles prepared, then scanned, in segments if that is cheaper.

The scratch of a tile (prepare_kernel) lives only during a call. For the backward the forward keeps
U and the states of every 64 tokens, both in the operands' dtype; everything else is computed again.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from openk3.ops.kda.segments import BLOCK
from openk3.ops.kda.triton_problem import TILE, TUNING, Inputs, Problem
from openk3.ops.kda.triton_scan import scan_forward_kernel
from openk3.ops.kda.triton_segments import fold_kernel
from openk3.ops.kda.triton_tiles import prepare_kernel
from openk3.ops.triton_support import launch_named


class Scratch(NamedTuple):
    """What prepare_kernel leaves for the scans."""

    wqk: Tensor
    """[tiles, H, 3, 16, D]: -W, Q, kg"""
    tp: Tensor
    """[tiles, H, 2, 16, 16]: T, P T"""
    gamma: Tensor
    """[tiles, H, D] float32"""


def prepare(x: Inputs, p: Problem, norms: Tensor | None = None) -> Scratch:
    """Scratch of all tiles. norms [rows, H, 2], if given, receives 1 / |q| and 1 / |k|."""
    slots, device = p.slots(TILE), x.q.device
    scratch = Scratch(
        torch.empty(slots, p.heads, 3, TILE, p.dim, dtype=p.operand, device=device),
        torch.empty(slots, p.heads, 2, TILE, TILE, dtype=p.operand, device=device),
        torch.empty(slots, p.heads, p.dim, dtype=torch.float32, device=device),
    )
    wide = p.operand == torch.float32
    launch_named(
        prepare_kernel,
        (slots * p.heads,),
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        **scratch._asdict(),
        rstd=norms,
        scale=x.scale,
        lower_bound=x.lower_bound,
        **x.rows("q", "k", "g", "beta"),
        C=TILE,
        HAS_BIAS=x.dt_bias is not None,
        SAVE_RSTD=norms is not None,
        OPERAND=tl.float32 if wide else tl.bfloat16,
        SMALL_PRECISION="tf32x3" if wide else "bf16x3",
        **p.common(x),
        **TUNING.prepare,
    )
    return scratch


class Saved(NamedTuple):
    """What the forward keeps for the backward."""

    u: Tensor | None
    """[rows, H, D]"""
    checkpoints: Tensor | None
    """[blocks, H, V, K]: the state at the start of each block of 64 tokens."""
    transition: Tensor | None
    """[segments, H, K, K] float32: M^T, if sequences were cut."""


class Wanted(NamedTuple):
    """Blocks whose first states are asked for."""

    index: Tensor
    """[blocks] int32: row of the result, or -1."""
    count: int


def forward(
    x: Inputs,
    p: Problem,
    initial: Tensor | None,
    *,
    output_final: bool,
    save: bool = False,
    wanted: Wanted | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Saved]:
    """-> o [rows,H,D], final state [N,H,K,V] or None, wanted states [P,H,V,K] or None, saved."""
    new = {"dtype": torch.float32, "device": x.q.device}
    like = {"dtype": p.operand, "device": x.q.device}
    square = (p.heads, p.dim, p.dim)
    scratch = prepare(x, p)
    o = torch.empty(p.rows, p.heads, p.dim, dtype=x.v.dtype, device=x.q.device)
    final = torch.empty(p.num_seqs, *square, **new) if output_final else None
    states = None if wanted is None else torch.empty(wanted.count, *square, **new)
    u = torch.empty(p.rows, p.heads, p.dim, **like) if save else None
    checkpoints = torch.empty(p.slots(BLOCK), *square, **like) if save else None
    carry, transition = (
        torch.empty(p.segments.num_slots, *square, **new) if p.segments.split else None
        for _ in range(2)
    )

    def scan(summary: bool) -> None:
        parts = p.dim // p.v_rows * (2 if summary else 1)
        launch_named(
            scan_forward_kernel,
            (p.segments.num_slots * p.heads * parts,),
            **scratch._asdict(),
            initial=initial,
            carry=carry,
            transition=transition,
            o=o,
            final=final,
            u=u,
            checkpoints=checkpoints,
            wanted=None if wanted is None else wanted.index,
            states=states,
            segment=p.segments.length,
            **x.rows("v"),
            C=TILE,
            BLOCK=BLOCK,
            V_ROWS=p.v_rows,
            SPLIT=p.segments.split,
            SUMMARY=summary,
            HAS_INITIAL=initial is not None,
            HAS_FINAL=output_final,
            SAVE=save and not summary,
            HAS_WANTED=wanted is not None and not summary,
            **p.common(x),
            **TUNING.forward,
        )

    if p.segments.split:
        scan(summary=True)
        fold(p, x.cu, carry, transition, reverse=False)
    scan(summary=False)
    return o, final, states, Saved(u, checkpoints, transition)


def fold(
    p: Problem,
    cu: Tensor | None,
    carry: Tensor | None,
    transition: Tensor | None,
    *,
    reverse: bool,
) -> None:
    """carry [segments, H, V, K], in place: from each segment's own state to the one passed on, by
    transition [segments, H, K, K]; gradients go in `reverse`."""
    rows = 16
    launch_named(
        fold_kernel,
        (p.num_seqs * p.heads * (p.dim // rows),),
        carry=carry,
        transition=transition,
        cu=cu,
        tokens=p.tokens,
        H=p.heads,
        segment=p.segments.length,
        D=p.dim,
        V_ROWS=rows,
        PACKED=p.packed,
        REVERSE=reverse,
        PRECISION="tf32x3",
    )
