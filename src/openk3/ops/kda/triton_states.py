"""KDA in Triton for serving: the states after requested tokens, out of one prefill pass.

The scan keeps, in float32, the state at the start of each 64-token block that holds the end of a
request; a small kernel walks from there, at most 63 tokens, by the recurrence itself. Both happen
without the host knowing any length. No gradients.

Legend: D = K = V head width, H heads, P positions, N sequences.
"""

# Calls between jit functions look to a type checker like calls from Python.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from openk3.ops.kda import triton_forward
from openk3.ops.kda.segments import BLOCK
from openk3.ops.kda.triton_forward import Wanted
from openk3.ops.kda.triton_math import L2_EPS, LOG2E, exp2, sigmoid
from openk3.ops.kda.triton_problem import Inputs, Problem
from openk3.ops.triton_support import launch_named


@triton.jit
def advance_kernel(
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    states,  # [P, H, V, K] float32: states at the starts of wanted blocks
    source,  # [P] int32: which of them a position walks from, or -1: `final`
    sequence,  # [P] int64: its sequence
    begin,  # [P] int64: first row to walk over
    end,  # [P] int64: row behind the last
    final,  # [N, H, K, V] float32
    out,  # [P, H, K, V] float32
    H,
    lower_bound,
    k_row,
    k_head,
    v_row,
    v_head,
    g_row,
    g_head,
    beta_row,
    beta_head,
    D: tl.constexpr,
    V_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    PARTS: tl.constexpr = D // V_ROWS
    program = tl.program_id(0)
    part = program % PARTS
    h = (program // PARTS) % H
    p = (program // (PARTS * H)).to(tl.int64)
    d = tl.arange(0, D)
    column = part * V_ROWS + tl.arange(0, V_ROWS)
    transposed = d[None, :] * D + column[:, None]  # [V, K] within a stored [K, V]
    src = tl.load(source + p).to(tl.int64)
    if src < 0:
        n = tl.load(sequence + p)
        S = tl.load(final + (n * H + h) * (D * D) + transposed)
    else:
        S = tl.load(states + (src * H + h) * (D * D) + column[:, None] * D + d[None, :])
        rate = exp2(tl.load(A_log + h) * LOG2E)
        bias = tl.load(dt_bias + h * D + d) if HAS_BIAS else tl.zeros([D], tl.float32)
        row = tl.load(begin + p)
        stop = tl.load(end + p)
        while row < stop:
            z = tl.load(g + row * g_row + h * g_head + d).to(tl.float32) + bias
            S *= exp2(sigmoid(rate * z) * (lower_bound * LOG2E))[None, :]
            x = tl.load(k + row * k_row + h * k_head + d).to(tl.float32)
            x *= tl.rsqrt(tl.sum(x * x, 0) + L2_EPS)
            b = sigmoid(tl.load(beta + row * beta_row + h * beta_head).to(tl.float32))
            y = tl.load(v + row * v_row + h * v_head + column).to(tl.float32)
            y = b * (y - tl.sum(S * x[None, :], 1))
            S += y[:, None] * x[None, :]
            row += 1
    tl.store(out + (p * H + h) * (D * D) + transposed, S)


def states_after(
    x: Inputs, p: Problem, initial: Tensor | None, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-> o [rows,H,D], final states [N,H,K,V], states after flat tokens `positions` [P,H,K,V]."""
    device, cu = x.q.device, x.cu
    where = positions.to(device, torch.int64)
    if cu is None:
        sequence = where // p.tokens
        first, last = sequence * p.tokens, (sequence + 1) * p.tokens
        slot0 = sequence * (-(-p.tokens // BLOCK))
    else:
        sequence = torch.searchsorted(cu[1:].long(), where, right=True)
        first, last = cu.long()[sequence], cu.long()[sequence + 1]
        slot0 = first // BLOCK + sequence
    block = (where + 1 - first) // BLOCK
    at_end = where + 1 == last  # then it is the final state, and its block may not exist
    slot = torch.where(at_end, p.slots(BLOCK), slot0 + block)
    index = torch.arange(where.numel(), dtype=torch.int32, device=device)
    wanted = torch.full((p.slots(BLOCK) + 1,), -1, dtype=torch.int32, device=device)
    wanted.scatter_reduce_(0, slot, index, "amax")
    o, final, states, _ = triton_forward.forward(
        x, p, initial, output_final=True, wanted=Wanted(wanted, where.numel())
    )
    assert final is not None
    assert states is not None
    out = torch.empty_like(states)
    if not where.numel():
        return o, final, out
    v_rows = min(32, p.dim)
    launch_named(
        advance_kernel,
        (where.numel() * p.heads * (p.dim // v_rows),),
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        states=states,
        source=torch.where(at_end, -1, wanted[slot]).to(torch.int32),
        sequence=sequence,
        begin=first + block * BLOCK,
        end=where + 1,
        final=final,
        out=out,
        H=p.heads,
        lower_bound=x.lower_bound,
        **x.rows("k", "v", "g", "beta"),
        D=p.dim,
        V_ROWS=v_rows,
        HAS_BIAS=x.dt_bias is not None,
        num_warps=4,
    )
    return o, final, out
