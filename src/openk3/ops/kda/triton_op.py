"""The Triton backend of KDA: torch custom ops with fake kernels and autograd, so that compiled
graphs do not break, and the states that serving asks for.

Arithmetic: products of bf16 operands, float32 accumulation, state and gates. No value of cu_seqlens
is read on the host.
"""

from typing import Any

import torch

from openk3.ops.kda import triton_backward, triton_forward
from openk3.ops.kda.call import KdaCall
from openk3.ops.kda.segments import BLOCK
from openk3.ops.kda.triton_forward import Saved
from openk3.ops.kda.triton_problem import Inputs, as_rows, problem_of
from openk3.ops.kda.triton_states import states_after

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A_log, Tensor? dt_bias"
_FORWARD = (
    f"({_INPUTS}, Tensor? initial, Tensor? cu_seqlens, float lower_bound, float scale, "
    "bool output_final, bool save, int segment) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    f"({_INPUTS}, Tensor? cu_seqlens, float lower_bound, float scale, int segment, Tensor o, "
    "Tensor u, Tensor checkpoints, Tensor transition, Tensor d_o, Tensor? d_final, "
    "bool need_initial) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def inputs_of(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, lower_bound, scale) -> Inputs:
    """The batch as rows."""
    q, k, v, g, beta = (as_rows(x) for x in (q, k, v, g, beta))
    return Inputs(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, lower_bound, scale)


@torch.library.custom_op("openk3::kda_forward", mutates_args=(), schema=_FORWARD)
def kda_forward(
    q, k, v, g, beta, A_log, dt_bias, initial, cu_seqlens, lower_bound, scale, output_final, save,
    segment,
):  # fmt: skip
    """-> o [B,T,H,D], final state, u, checkpoints, transition; those not asked for are empty."""
    x = inputs_of(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, lower_bound, scale)
    p = problem_of(q, cu_seqlens, segment)
    o, final, _, saved = triton_forward.forward(x, p, initial, output_final=output_final, save=save)
    kept = [t if save and t is not None else q.new_empty(0) for t in saved]
    return o.view_as(v), q.new_empty(0) if final is None else final, *kept


@kda_forward.register_fake
def _(
    q, k, v, g, beta, A_log, dt_bias, initial, cu, lower_bound, scale, output_final, save, segment
):
    p = problem_of(q, cu, segment)
    square = (p.heads, p.dim, p.dim)
    new = {"dtype": torch.float32}
    final = q.new_empty(p.num_seqs, *square, **new) if output_final else q.new_empty(0)
    saved = [q.new_empty(0) for _ in range(3)]
    if save:
        saved[0] = q.new_empty(p.rows, p.heads, p.dim, dtype=p.operand)
        saved[1] = q.new_empty(p.slots(BLOCK), *square, dtype=p.operand)
        if p.segments.split:
            saved[2] = q.new_empty(p.segments.num_slots, *square, **new)
    return v.new_empty(v.shape), final, *saved


@torch.library.custom_op("openk3::kda_backward", mutates_args=(), schema=_BACKWARD)
def kda_backward(
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, lower_bound, scale, segment, o, u, checkpoints,
    transition, d_o, d_final, need_initial,
):  # fmt: skip
    """-> gradients of q, k, v, g, beta, A_log, dt_bias and the initial state (or empty)."""
    grads = triton_backward.backward(
        inputs_of(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, lower_bound, scale),
        problem_of(q, cu_seqlens, segment),
        Saved(u, checkpoints, transition),
        o.flatten(0, 1),
        as_rows(d_o),
        d_final,
        need_initial=need_initial,
    )
    like = (q, k, v, g, beta, A_log, dt_bias, None)
    return tuple(
        q.new_empty(0) if grad is None else grad if x is None else grad.view(x.shape)
        for x, grad in zip(like, grads, strict=True)
    )


@kda_backward.register_fake
def _(
    q, k, v, g, beta, A_log, dt_bias, cu, lower_bound, scale, segment, o, u, checkpoints,
    transition, d_o, d_final, need_initial,
):  # fmt: skip
    p = problem_of(q, cu, segment)
    grads = [x.new_empty(x.shape) for x in (q, k, v, g, beta, A_log)]
    bias = q.new_empty(0) if dt_bias is None else dt_bias.new_empty(dt_bias.shape)
    shape = (p.num_seqs, p.heads, p.dim, p.dim) if need_initial else (0,)
    dtype = torch.float32 if need_initial else q.dtype
    return *grads, bias, q.new_empty(shape, dtype=dtype)


def _setup(ctx, inputs, output) -> None:
    q, k, v, g, beta, A_log, dt_bias, initial, cu, lower_bound, scale, _, save, segment = inputs
    o, _, u, checkpoints, transition = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, cu, o, u, checkpoints, transition)
    ctx.constants = lower_bound, scale, segment
    ctx.has_initial, ctx.saved_all = initial is not None, save


def _backward(ctx, d_o, d_final, *_):
    assert ctx.saved_all, "kda_forward was run with save=False, yet a gradient is asked for"
    q, k, v, g, beta, A_log, dt_bias, cu, o, *saved = ctx.saved_tensors
    if d_o is None:
        d_o = torch.zeros_like(v)
    if d_final is not None:
        d_final = d_final.contiguous()
    grads = kda_backward(
        q, k, v, g, beta, A_log, dt_bias, cu, *ctx.constants, o, *saved, d_o, d_final,
        ctx.has_initial,
    )  # fmt: skip
    bias = grads[6] if dt_bias is not None else None
    return *grads[:6], bias, grads[7] if ctx.has_initial else None, *[None] * 6


kda_forward.register_autograd(_backward, setup_context=_setup)


def kda_triton(call: KdaCall, segment: int = 0) -> Any:
    """The triton backend. segment: tokens a segment of a cut sequence, 0 to let it plan."""
    q, v, cu, initial, dt_bias = call.q, call.v, call.cu_seqlens, call.initial_state, call.dt_bias
    if q.numel() == 0:
        return _nothing(call)
    inputs = (
        *(q, call.k, v, call.g, call.beta, call.A_log.float().contiguous()),
        None if dt_bias is None else dt_bias.float().contiguous(),
    )
    initial = None if initial is None else initial.float().contiguous()
    cu = None if cu is None else cu.to(q.device).contiguous()
    bounds = call.lower_bound, call.scale
    if call.state_positions is not None:
        x, p = inputs_of(*inputs, cu, *bounds), problem_of(q, cu, segment)
        o, final, states = states_after(x, p, initial, call.state_positions)
        return o.view_as(v), final if call.output_final_state else None, states
    wanted = call.output_final_state, call.needs_grad
    o, final, *_ = kda_forward(*inputs, initial, cu, *bounds, *wanted, segment)
    return o, final if call.output_final_state else None


def _nothing(call: KdaCall) -> Any:
    """No token at all: states pass through."""
    final = call.initial_state
    if final is None:
        final = call.q.new_zeros(call.state_shape, dtype=torch.float32)
    last = final if call.output_final_state else None
    if call.state_positions is None:
        return torch.zeros_like(call.v), last
    return torch.zeros_like(call.v), last, final.new_zeros(0, *call.state_shape[1:])
