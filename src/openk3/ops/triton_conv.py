"""Short causal depthwise convolution with SiLU in Triton, forward and backward (see `ops.conv`).

One pass over x forward; one over x and dy backward, which computes the sums before SiLU again. Four
taps. A program owns 64 tokens of one sequence and some channels; a block's slot follows from cu
alone, as in kda.triton_math.

Legend: B batch, T tokens, D channels, W = 4 taps, N sequences.
"""

# Calls between jit functions look to a type checker like calls from Python.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from openk3.ops.kda.segments import num_slots
from openk3.ops.kda.triton_math import locate, sigmoid
from openk3.ops.triton_support import launch

TAPS, BLOCK, CHANNELS = 4, 64, 64


@triton.jit
def _inputs(x, initial, t, before, left, c, D, HAS_INITIAL: tl.constexpr):
    """x at tokens t [L] counted from the block's start, [L, C] float32.

    `before` tokens of the sequence precede the block and `left` follow its start; the initial state
    precedes the sequence, zero follows it.
    """
    at = t[:, None] * D + c[None, :]
    inside = (c < D)[None, :]
    y = tl.load(x + at, inside & ((t >= -before) & (t < left))[:, None], 0.0).to(tl.float32)
    if HAS_INITIAL:
        at = (t + before + 4)[:, None] * D + c[None, :]
        y += tl.load(initial + at, inside & (t < -before)[:, None], 0.0).to(tl.float32)
    return y


@triton.jit
def conv_forward_kernel(
    x,
    weight,  # [D, 4] float32
    initial,  # [N, 4, D]
    cu,
    y,
    tokens,
    num_seqs,
    D,
    C: tl.constexpr,
    L: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    n, index, start, length = locate(tl.program_id(0), cu, tokens, num_seqs, L, PACKED)
    if index * L >= length:
        return
    c = tl.program_id(1) * C + tl.arange(0, C)
    t = tl.arange(0, L)
    before = index * L
    left = length - before
    offset = (start + before).to(tl.int64) * D
    x += offset
    if HAS_INITIAL:
        initial += n.to(tl.int64) * 4 * D
    z = tl.zeros([L, C], tl.float32)
    for j in tl.static_range(4):
        w = tl.load(weight + c * 4 + j, c < D, 0.0)
        z += w[None, :] * _inputs(x, initial, t - 3 + j, before, left, c, D, HAS_INITIAL)
    at = t[:, None] * D + c[None, :]
    inside = (t < left)[:, None] & (c < D)[None, :]
    tl.store(y + offset + at, (z * sigmoid(z)).to(y.dtype.element_ty), inside)


@triton.jit
def conv_backward_kernel(
    x,
    weight,
    initial,
    dy,
    cu,
    dx,
    d_weight,  # [blocks, D, 4] float32: sums over a block
    d_initial,  # [N, 4, D]
    tokens,
    num_seqs,
    D,
    C: tl.constexpr,
    L: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    slot = tl.program_id(0)
    n, index, start, length = locate(slot, cu, tokens, num_seqs, L, PACKED)
    c = tl.program_id(1) * C + tl.arange(0, C)
    if (index > 0) & (index * L >= length):
        return
    t = tl.arange(0, L)
    before = index * L
    left = length - before
    offset = (start + before).to(tl.int64) * D
    x += offset
    if HAS_INITIAL:
        initial += n.to(tl.int64) * 4 * D
    grad = tl.zeros([L, C], tl.float32)
    early = tl.zeros([4, C], tl.float32)  # gradient of inputs -4 .. -1
    inside = (c < D)[None, :]
    # dz of token t + 3 - j reaches input t through tap j
    for j in tl.static_range(4):
        s = t + 3 - j
        z = tl.zeros([L, C], tl.float32)
        for i in tl.static_range(4):
            w = tl.load(weight + c * 4 + i, c < D, 0.0)
            z += w[None, :] * _inputs(x, initial, s - 3 + i, before, left, c, D, HAS_INITIAL)
        gate = sigmoid(z)
        at = s[:, None] * D + c[None, :]
        dz = tl.load(dy + offset + at, inside & (s < left)[:, None], 0.0).to(tl.float32)
        dz *= gate * (1 + z * (1 - gate))
        grad += tl.load(weight + c * 4 + j, c < D, 0.0)[None, :] * dz
        if j == 3:  # s = t: the block's own tokens
            for i in tl.static_range(4):
                own = _inputs(x, initial, t - 3 + i, before, left, c, D, HAS_INITIAL)
                sums = d_weight + slot.to(tl.int64) * D * 4 + c * 4 + i
                tl.store(sums, tl.sum(dz * own, 0), c < D)
            if HAS_INITIAL and (index == 0):
                past = tl.arange(0, 4) - 4
                for i in tl.static_range(4):
                    w = tl.load(weight + c * 4 + i, c < D, 0.0)
                    hit = past[:, None, None] == (t - 3 + i)[None, :, None]
                    early += w[None, :] * tl.sum(tl.where(hit, dz[None, :, :], 0.0), 1)
    at = t[:, None] * D + c[None, :]
    tl.store(dx + offset + at, grad.to(dx.dtype.element_ty), inside & (t < left)[:, None])
    if HAS_INITIAL and (index == 0):
        to = n.to(tl.int64) * 4 * D + tl.arange(0, 4)[:, None] * D + c[None, :]
        tl.store(d_initial + to, early.to(d_initial.dtype.element_ty), inside)


def _geometry(x: Tensor, cu: Tensor | None) -> tuple[tuple[int, int], dict]:
    batch, tokens, dim = x.shape
    num = batch if cu is None else cu.numel() - 1
    slots = num_slots(tokens, num, BLOCK, cu is not None)
    meta = {"cu": cu, "tokens": tokens, "num_seqs": num, "D": dim, "C": CHANNELS, "L": BLOCK}
    return (slots, -(-dim // CHANNELS)), meta | {"PACKED": cu is not None}


_SCHEMA = "(Tensor x, Tensor weight, Tensor? initial, Tensor? cu_seqlens) -> Tensor"
_GRAD_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? initial, Tensor? cu_seqlens, Tensor dy) "
    "-> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("openk3::short_conv", mutates_args=(), schema=_SCHEMA)
def conv_forward(x, weight, initial, cu_seqlens):
    """x [B,T,D] dense, weight [D,4] float32, initial [N,4,D] -> y [B,T,D]."""
    grid, meta = _geometry(x, cu_seqlens)
    y = torch.empty_like(x)
    launch(
        conv_forward_kernel,
        grid,
        x,
        weight,
        initial,
        y=y,
        HAS_INITIAL=initial is not None,
        **meta,
    )
    return y


@conv_forward.register_fake
def _(x, weight, initial, cu_seqlens):
    return torch.empty_like(x)


@torch.library.custom_op("openk3::short_conv_backward", mutates_args=(), schema=_GRAD_SCHEMA)
def conv_backward(x, weight, initial, cu_seqlens, dy):
    """-> gradients of x, weight and initial (or empty)."""
    grid, meta = _geometry(x, cu_seqlens)
    dx = torch.empty_like(x)
    d_weight = torch.zeros(grid[0], x.shape[2], TAPS, dtype=torch.float32, device=x.device)
    d_initial = x.new_empty(0) if initial is None else torch.empty_like(initial)
    launch(
        conv_backward_kernel,
        grid,
        x,
        weight,
        initial,
        dy,
        dx=dx,
        d_weight=d_weight,
        d_initial=d_initial,
        HAS_INITIAL=initial is not None,
        **meta,
        num_warps=8,
    )
    return dx, d_weight.sum(0), d_initial


@conv_backward.register_fake
def _(x, weight, initial, cu_seqlens, dy):
    d_initial = x.new_empty(0) if initial is None else torch.empty_like(initial)
    return torch.empty_like(x), torch.empty_like(weight), d_initial


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):
    x, weight, initial, cu = ctx.saved_tensors
    dx, d_weight, d_initial = conv_backward(x, weight, initial, cu, dy.contiguous())
    return dx, d_weight, None if initial is None else d_initial, None


conv_forward.register_autograd(_backward, setup_context=_setup)


def short_conv_triton(
    x: Tensor,
    weight: Tensor,
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """As `ops.conv.short_conv`; no length is read on the host."""
    x = x.contiguous()
    weight = weight.reshape(x.shape[2], TAPS).float().contiguous()
    if initial_state is not None:
        initial_state = initial_state.to(x.dtype).contiguous()
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(x.device).contiguous()
    y = conv_forward(x, weight, initial_state, cu_seqlens) if x.numel() else torch.zeros_like(x)
    return y, _final_state(x, initial_state, cu_seqlens) if output_final_state else None


def _final_state(x: Tensor, initial: Tensor | None, cu: Tensor | None) -> Tensor:
    """The last four inputs of each sequence [N, 4, D], reaching back into the initial state."""
    batch, tokens, dim = x.shape
    if cu is None:
        start = torch.arange(batch, device=x.device) * tokens
        end = start + tokens
    else:
        start, end = cu[:-1].long(), cu[1:].long()
    back = torch.arange(-TAPS, 0, device=x.device)
    row = end[:, None] + back  # [N, 4]
    inside = row >= start[:, None]
    last = torch.arange(start.numel(), device=x.device)[:, None]
    state = x.new_zeros(start.numel(), TAPS, dim) if initial is None else initial
    earlier = state[last, (row - start[:, None] + TAPS).clamp(0, TAPS - 1)]
    if not x.numel():
        return earlier
    return torch.where(inside[..., None], x.flatten(0, 1)[row.clamp(min=0)], earlier)
