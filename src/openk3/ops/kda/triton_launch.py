"""Host side of the Triton KDA kernels: shapes, buffers and launches of forward and backward.

The scratch of a tile (prepare_kernel) lives only during a call. For the backward the forward keeps
U and the states of every 64 tokens, both in the operands' dtype; everything else is computed again.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from openk3.ops.kda.segments import WHOLE, Segments, num_slots, plan_segments
from openk3.ops.kda.triton_grads import grads_kernel, pairs_kernel
from openk3.ops.kda.triton_scan import scan_backward_kernel, scan_forward_kernel
from openk3.ops.kda.triton_segments import fold_kernel
from openk3.ops.kda.triton_tiles import prepare_kernel

TILE, BLOCK = 16, 64
INTERPRETED = not isinstance(prepare_kernel, triton.JITFunction)


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """SM count of a CUDA device; 1 where the interpreter runs the kernels."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def lower_ones(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[64, 64] of ones on and below the diagonal: a running sum as a matrix product."""
    return torch.ones(BLOCK, BLOCK, dtype=dtype, device=device).tril()


@dataclass(frozen=True)
class Tuning:
    """Launch parameters of each kernel, chosen by measurement on an H200."""

    prepare: dict[str, int] = field(default_factory=lambda: {"num_warps": 1, "maxnreg": 168})
    v_rows: int = 64
    forward: dict[str, int] = field(default_factory=lambda: {"num_warps": 4, "STAGES": 3})
    backward: dict[str, int] = field(default_factory=lambda: {"num_warps": 4, "STAGES": 3})
    pairs: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})
    grads: dict[str, int] = field(default_factory=lambda: {"num_warps": 4, "BK": 32})


TUNING = Tuning()


@dataclass(frozen=True)
class Problem:
    """The geometry of one call. Rows are the tokens of the whole batch."""

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

    def common(self, cu: Tensor | None) -> dict[str, Any]:
        return {"cu": cu, "tokens": self.tokens, "H": self.heads, "PACKED": self.packed}


def problem_of(q: Tensor, cu_seqlens: Tensor | None, segment: int | None = None) -> Problem:
    """Geometry of a call on q [B, T, H, D]. segment: tokens a segment, for tests; None plans."""
    batch, tokens, heads, dim = q.shape
    packed = cu_seqlens is not None
    num_seqs = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    if segment is None:
        segments = plan_segments(tokens, num_seqs, heads, num_multiprocessors(q.device), packed)
    else:
        segments = Segments(segment, num_slots(tokens, num_seqs, segment, packed))
    wide = q.dtype == torch.float32 or INTERPRETED  # the interpreter has no bf16 products
    operand = torch.float32 if wide else torch.bfloat16
    return Problem(batch * tokens, tokens, num_seqs, heads, dim, packed, operand, segments)


def as_rows(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B * T, ...] with a dense last dimension; copies only if it must."""
    rows = x.flatten(0, 1)
    return rows if rows.ndim < 3 or rows.stride(-1) == 1 else rows.contiguous()


def prepare(
    p: Problem, q, k, g, beta, A_log, dt_bias, cu, lower_bound, scale, rstd=None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scratch of all tiles: wqk [slots,H,3,16,D], tp [slots,H,2,16,16], gamma [slots,H,D]."""
    slots, device = p.slots(TILE), q.device
    wqk = torch.empty(slots, p.heads, 3, TILE, p.dim, dtype=p.operand, device=device)
    tp = torch.empty(slots, p.heads, 2, TILE, TILE, dtype=p.operand, device=device)
    gamma = torch.empty(slots, p.heads, p.dim, dtype=torch.float32, device=device)
    prepare_kernel[(slots * p.heads,)](
        q,
        k,
        g,
        beta,
        A_log,
        dt_bias,
        wqk=wqk,
        tp=tp,
        gamma=gamma,
        rstd=rstd,
        num_seqs=p.num_seqs,
        scale=scale,
        lower_bound=lower_bound,
        **_strides(q=q, k=k, g=g, beta=beta),
        D=p.dim,
        C=TILE,
        HAS_BIAS=dt_bias is not None,
        SAVE_RSTD=rstd is not None,
        OPERAND=_triton_dtype(p.operand),
        PRECISION=p.precision,
        SMALL_PRECISION="tf32x3" if p.operand == torch.float32 else "bf16x3",
        **p.common(cu),
        **TUNING.prepare,
    )
    return wqk, tp, gamma


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    initial: Tensor | None,
    cu: Tensor | None,
    wanted: Tensor | None,
    num_wanted: int,
    lower_bound: float,
    scale: float,
    output_final: bool,
    save: bool,
    p: Problem,
) -> tuple[Tensor, Tensor | None, Tensor | None, tuple]:
    """-> o, final state or None, states at wanted blocks [P,H,V,K] or None, saved for backward.

    q, k, v, g [rows, H, D], beta [rows, H]. saved: (u, checkpoints, transitions or None).
    """
    device = q.device
    new = dict(dtype=torch.float32, device=device)
    square = (p.heads, p.dim, p.dim)
    scratch = prepare(p, q, k, g, beta, A_log, dt_bias, cu, lower_bound, scale)
    o = torch.empty(p.rows, p.heads, p.dim, dtype=v.dtype, device=device)
    final = torch.empty(p.num_seqs, *square, **new) if output_final else None
    states = torch.empty(num_wanted, *square, **new) if wanted is not None else None
    u = checkpoints = carry = transition = None
    if save:
        u = torch.empty(p.rows, p.heads, p.dim, dtype=p.operand, device=device)
        checkpoints = torch.empty(p.slots(BLOCK), *square, dtype=p.operand, device=device)
    if p.segments.split:
        carry = torch.empty(p.segments.num_slots, *square, **new)
        transition = torch.empty(p.segments.num_slots, *square, **new)

    def scan(summary: bool) -> None:
        parts = p.dim // p.v_rows * (2 if summary else 1)
        scan_forward_kernel[(p.segments.num_slots * p.heads * parts,)](
            v,
            *scratch,
            initial=initial,
            carry=carry,
            transition=transition,
            o=o,
            final=final,
            u=u,
            checkpoints=checkpoints,
            wanted=wanted,
            states=states,
            num_seqs=p.num_seqs,
            segment=p.segments.length,
            **_strides(v=v),
            D=p.dim,
            C=TILE,
            V_ROWS=p.v_rows,
            SPLIT=p.segments.split,
            SUMMARY=summary,
            HAS_INITIAL=initial is not None,
            HAS_FINAL=output_final,
            SAVE=save and not summary,
            HAS_WANTED=wanted is not None and not summary,
            PRECISION=p.precision,
            **p.common(cu),
            **TUNING.forward,
        )

    if p.segments.split:
        scan(summary=True)
        _fold(p, carry, transition, cu, reverse=False)
    scan(summary=False)
    return o, final, states, (u, checkpoints, transition)


def _fold(p: Problem, carry, transition, cu, reverse: bool) -> None:
    rows = 16
    fold_kernel[(p.num_seqs * p.heads * (p.dim // rows),)](
        carry,
        transition,
        segment=p.segments.length,
        D=p.dim,
        V_ROWS=rows,
        REVERSE=reverse,
        PRECISION="tf32x3",
        **p.common(cu),
    )


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    cu: Tensor | None,
    lower_bound: float,
    scale: float,
    saved: tuple,
    o: Tensor,
    d_o: Tensor,
    d_final: Tensor | None,
    need_initial: bool,
    p: Problem,
) -> tuple[Tensor, ...]:
    """-> dq, dk, dv, dg, d_beta, d_A_log, d_dt_bias or None, d_initial or None."""
    device = q.device
    new = dict(dtype=torch.float32, device=device)
    square = (p.heads, p.dim, p.dim)
    u, checkpoints, transition = saved
    norms = torch.empty(p.rows, p.heads, 2, **new)
    scratch = prepare(p, q, k, g, beta, A_log, dt_bias, cu, lower_bound, scale, norms)
    gamma = scratch[2]
    dv = torch.empty(p.rows, p.heads, p.dim, dtype=v.dtype, device=device)
    d_initial = torch.empty(p.num_seqs, *square, **new) if need_initial else None
    ends = torch.empty(p.slots(BLOCK), *square, dtype=p.operand, device=device)
    carry = torch.empty(p.segments.num_slots, *square, **new) if p.segments.split else None

    def scan(summary: bool) -> None:
        parts = p.dim // p.v_rows
        scan_backward_kernel[(p.segments.num_slots * p.heads * parts,)](
            d_o,
            *scratch,
            d_final=d_final,
            carry=carry,
            dv=dv,
            d_initial=d_initial,
            checkpoints=ends,
            num_seqs=p.num_seqs,
            segment=p.segments.length,
            **_strides(o=d_o),
            D=p.dim,
            C=TILE,
            V_ROWS=p.v_rows,
            SPLIT=p.segments.split,
            SUMMARY=summary,
            HAS_FINAL=d_final is not None,
            HAS_INITIAL=need_initial,
            PRECISION=p.precision,
            **p.common(cu),
            **TUNING.backward,
        )

    if p.segments.split:
        scan(summary=True)
        _fold(p, carry, transition, cu, reverse=True)
    scan(summary=False)
    del scratch, carry

    pairs = torch.empty(p.slots(BLOCK), p.heads, 2, BLOCK, BLOCK, dtype=p.operand, device=device)
    sums = torch.empty(p.rows, p.heads, 2, **new)
    d_beta = torch.empty(p.rows, p.heads, dtype=beta.dtype, device=device)
    pairs_kernel[(p.slots(BLOCK) * p.heads,)](
        v,
        beta,
        u,
        o,
        d_o,
        dv,
        pairs=pairs,
        sums=sums,
        d_beta=d_beta,
        num_seqs=p.num_seqs,
        **_strides(v=v, beta=beta, o=d_o),
        D=p.dim,
        L=BLOCK,
        PRECISION=p.precision,
        **p.common(cu),
        **TUNING.pairs,
    )
    dq, dk, dg = (
        torch.empty(p.rows, p.heads, p.dim, dtype=x.dtype, device=device) for x in (q, k, g)
    )
    d_bias = torch.zeros(p.slots(BLOCK), p.heads, p.dim, **new)
    d_A_log = torch.zeros(p.slots(BLOCK), p.heads, **new)
    grads_kernel[(p.slots(BLOCK) * p.heads,)](
        q,
        k,
        g,
        A_log,
        dt_bias,
        u=u,
        d_o=d_o,
        dv=dv,
        pairs=pairs,
        sums=sums,
        norms=norms,
        gamma=gamma,
        ones=lower_ones(p.operand, device),
        starts=checkpoints,
        ends=ends,
        dq=dq,
        dk=dk,
        dg=dg,
        d_bias=d_bias,
        d_A_log=d_A_log,
        num_seqs=p.num_seqs,
        scale=scale,
        lower_bound=lower_bound,
        **_strides(q=q, k=k, g=g, o=d_o),
        D=p.dim,
        L=BLOCK,
        HAS_BIAS=dt_bias is not None,
        PRECISION=p.precision,
        **p.common(cu),
        **TUNING.grads,
    )
    d_bias = d_bias.sum(0) * A_log.exp()[:, None] if dt_bias is not None else None
    return dq, dk, dv, dg, d_beta, d_A_log.sum(0), d_bias, d_initial


def _strides(**tensors: Tensor) -> dict[str, int]:
    out = {}
    for name, x in tensors.items():
        out[f"{name}_row"], out[f"{name}_head"] = x.stride(0), x.stride(1)
    return out


def _triton_dtype(dtype: torch.dtype):
    import triton.language as tl

    return tl.float32 if dtype == torch.float32 else tl.bfloat16
