"""The short convolution in Triton: torch custom ops with fake kernels and autograd.

Legend: B batch, T tokens, D channels, N sequences.
"""

import torch
from torch import Tensor

from openk3.ops.conv_kernels import conv_backward_kernel, conv_forward_kernel
from openk3.ops.kda.segments import num_slots
from openk3.ops.triton_support import launch_named

TAPS, RUN = 4, 128
CHANNELS = {"forward": 128, "backward": 64}


def _geometry(x: Tensor, cu: Tensor | None, which: str) -> tuple[tuple[int, int], dict]:
    batch, tokens, dim = x.shape
    num = batch if cu is None else cu.numel() - 1
    channels = CHANNELS[which]
    meta = {"cu": cu, "tokens": tokens, "num_seqs": num, "D": dim, "C": channels, "L": RUN}
    meta |= {"PACKED": cu is not None, "num_warps": 1}
    return (num_slots(tokens, num, RUN, cu is not None), -(-dim // channels)), meta


_SCHEMA = "(Tensor x, Tensor weight, Tensor? initial, Tensor? cu_seqlens) -> Tensor"
_GRAD_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? initial, Tensor? cu_seqlens, Tensor dy) "
    "-> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("openk3::short_conv", mutates_args=(), schema=_SCHEMA)
def conv_forward(x, weight, initial, cu_seqlens):
    """x [B,T,D] dense, weight [4,D] float32, initial [N,4,D] -> y [B,T,D]."""
    grid, meta = _geometry(x, cu_seqlens, "forward")
    y = torch.empty_like(x)
    launch_named(
        conv_forward_kernel,
        grid,
        x=x,
        weight=weight,
        initial=initial,
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
    grid, meta = _geometry(x, cu_seqlens, "backward")
    dx = torch.empty_like(x)
    d_weight = torch.zeros(grid[0], TAPS, x.shape[2], dtype=torch.float32, device=x.device)
    d_initial = x.new_empty(0) if initial is None else torch.empty_like(initial)
    launch_named(
        conv_backward_kernel,
        grid,
        x=x,
        weight=weight,
        initial=initial,
        dy=dy,
        dx=dx,
        d_weight=d_weight,
        d_initial=d_initial,
        HAS_INITIAL=initial is not None,
        **meta,
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
    weight = weight.reshape(x.shape[2], TAPS).float().t().contiguous()
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
