"""Host side of the Triton KDA kernels: shapes, buffers and launches of forward and backward.

The scratch of a tile (prepare_kernel) lives only during a call. For the backward the forward keeps
U and the states of every 64 tokens, both in the operands' dtype; everything else is computed again.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openk3.ops.kda.segments import Segments, num_slots, plan_segments
from openk3.ops.kda.triton_grads import grads_kernel, pairs_kernel
from openk3.ops.kda.triton_scan import scan_backward_kernel, scan_forward_kernel
from openk3.ops.kda.triton_segments import fold_kernel
from openk3.ops.kda.triton_tiles import prepare_kernel
from openk3.ops.triton_support import launch, num_sms

TILE, BLOCK = 16, 64
INTERPRETED = not isinstance(prepare_kernel, triton.JITFunction)


class Tuning(NamedTuple):
    """Launch parameters of each kernel, chosen by measurement on an H200."""

    prepare: dict[str, int]
    v_rows: int
    """Columns of the state that one scan program owns."""
    forward: dict[str, int]
    backward: dict[str, int]
    pairs: dict[str, int]
    grads: dict[str, int]
    column_width: int
    """Columns of a head that grads_kernel holds at a time."""


TUNING = Tuning(
    prepare={"num_warps": 1},
    v_rows=64,
    forward={"num_warps": 4, "STAGES": 3},
    backward={"num_warps": 4, "STAGES": 3},
    pairs={"num_warps": 4},
    grads={"num_warps": 4},
    column_width=32,
)


class Inputs(NamedTuple):
    """Arguments of a call, by rows: the tokens of the whole batch."""

    q: Tensor
    """[rows, H, D], as k, v, g; any strides but a dense last dimension."""
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    """[rows, H]"""
    A_log: Tensor
    """[H] float32"""
    dt_bias: Tensor | None
    """[H * D] float32"""
    cu: Tensor | None
    """[N + 1] offsets of packed sequences, on the device."""
    lower_bound: float
    scale: float

    def strides(self, *names: str) -> dict[str, int]:
        return strides(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class Problem:
    """The geometry of one call."""

    rows: int
    tokens: int
    """Of the packed row, or of each sequence."""
    num_seqs: int
    heads: int
    dim: int
    packed: bool
    operand: torch.dtype
    """dtype of tensor-core operands, scratch and checkpoints."""
    segments: Segments

    def slots(self, unit: int) -> int:
        return num_slots(self.tokens, self.num_seqs, unit, self.packed)

    @property
    def v_rows(self) -> int:
        return min(TUNING.v_rows, self.dim)

    @property
    def precision(self) -> str:
        return "tf32x3" if self.operand == torch.float32 else "tf32"

    def common(self, x: Inputs) -> dict[str, Any]:
        """Arguments that every kernel but the fold takes."""
        return {
            "cu": x.cu,
            "tokens": self.tokens,
            "num_seqs": self.num_seqs,
            "H": self.heads,
            "D": self.dim,
            "PACKED": self.packed,
            "PRECISION": self.precision,
        }


def problem_of(q: Tensor, cu_seqlens: Tensor | None, segment: int = 0) -> Problem:
    """Geometry of a call on q [B, T, H, D]. segment: tokens a segment; 0 lets it plan."""
    batch, tokens, heads, dim = q.shape
    packed = cu_seqlens is not None
    num_seqs = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    if segment == 0:
        segments = plan_segments(tokens, num_seqs, heads, num_sms(q.device), packed)
    else:
        segments = Segments(segment, num_slots(tokens, num_seqs, segment, packed))
    wide = q.dtype == torch.float32 or INTERPRETED  # the interpreter has no bf16 products
    operand = torch.float32 if wide else torch.bfloat16
    return Problem(batch * tokens, tokens, num_seqs, heads, dim, packed, operand, segments)


def as_rows(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B * T, ...] with a dense last dimension; copies only if it must."""
    rows = x.flatten(0, 1)
    dense = rows.ndim < 3 or rows.stride(-1) == 1
    return rows if dense else rows.contiguous()


def strides(**tensors: Tensor) -> dict[str, int]:
    """Row and head strides of [rows, H, ...] tensors, named as the kernels name them."""
    out = {}
    for name, x in tensors.items():
        out[f"{name}_row"], out[f"{name}_head"] = x.stride(0), x.stride(1)
    return out


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
    launch(
        prepare_kernel,
        (slots * p.heads,),
        x.q,
        x.k,
        x.g,
        x.beta,
        x.A_log,
        x.dt_bias,
        **scratch._asdict(),
        rstd=norms,
        scale=x.scale,
        lower_bound=x.lower_bound,
        **x.strides("q", "k", "g", "beta"),
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
        launch(
            scan_forward_kernel,
            (p.segments.num_slots * p.heads * parts,),
            x.v,
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
            **x.strides("v"),
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
        _fold(p, x.cu, carry, transition, reverse=False)
    scan(summary=False)
    return o, final, states, Saved(u, checkpoints, transition)


def _fold(p: Problem, cu: Tensor | None, carry, transition, reverse: bool) -> None:
    rows = 16
    launch(
        fold_kernel,
        (p.num_seqs * p.heads * (p.dim // rows),),
        carry,
        transition,
        cu,
        p.tokens,
        p.heads,
        p.segments.length,
        D=p.dim,
        V_ROWS=rows,
        PACKED=p.packed,
        REVERSE=reverse,
        PRECISION="tf32x3",
    )


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
    launch(
        grads_kernel,
        (p.slots(BLOCK) * p.heads,),
        x.q,
        x.k,
        x.g,
        x.A_log,
        x.dt_bias,
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
        **x.strides("q", "k", "g"),
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
        launch(
            scan_backward_kernel,
            (p.segments.num_slots * p.heads * (p.dim // p.v_rows),),
            d_o,
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
        _fold(p, x.cu, carry, saved.transition, reverse=True)
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
    launch(
        pairs_kernel,
        (p.slots(BLOCK) * p.heads,),
        x.v,
        x.beta,
        saved.u,
        o,
        d_o,
        dv,
        pairs=pairs,
        sums=sums,
        d_beta=d_beta,
        **x.strides("v", "beta"),
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
