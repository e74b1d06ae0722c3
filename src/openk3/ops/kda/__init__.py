"""Kimi Delta Attention (K3 report §2.1.1): one public op over a table of backends."""

from typing import Any

import torch
from torch import Tensor

from openk3.ops.backends import Backend, BackendTable, always
from openk3.ops.kda import external
from openk3.ops.kda.call import KdaCall
from openk3.ops.packed import sequence_lengths
from openk3.ops.precision import outside_autocast
from openk3.ops.triton_support import triton_runs

RECURRENT_BELOW = 5  # up to this many tokens a sequence, the recurrence is cheaper than a chunk


def _reference() -> Any:
    return kda_reference


def _triton() -> Any:
    from openk3.ops.kda.triton_op import kda_triton

    return kda_triton


def _triton_usable(
    *,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    value_width: int = 0,
    needs_grad: bool = False,
    with_states: bool = False,
    **_: Any,
) -> tuple[bool, str]:
    usable, reason = triton_runs(device)
    if not usable:
        return False, reason
    if dtype not in (torch.bfloat16, torch.float16):
        return False, f"the kernels multiply in bfloat16; {dtype} inputs keep their precision"
    if width not in (64, 128) or value_width not in (0, width):
        return False, f"the kernels take K = V of 64 or 128, not {width} and {value_width}"
    if with_states and needs_grad:
        return False, "the states at state_positions carry no gradient"
    return True, reason


BACKENDS = BackendTable(
    "kda",
    [
        Backend("triton", "an NVIDIA GPU and the triton package", _triton_usable, _triton),
        Backend("reference", "nothing", always, _reference),
        # behind the reference: never chosen unasked
        Backend("fla", "flash-linear-attention", external.fla_usable, lambda: external.kda_fla),
        Backend("flash_kda", "FlashKDA", external.flash_kda_usable, lambda: external.kda_flash_kda),
        Backend(
            "attn_gym",
            "attention-gym and nvidia-cutlass-dsl",
            external.attn_gym_usable,
            lambda: external.kda_attn_gym,
        ),
    ],
)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    lower_bound: float = -5.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    state_positions: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Gated delta-rule attention of raw projections.

    On a CUDA device the values of a cu_seqlens that is already there are trusted, not read.

    q, k [B,T,H,K], v [B,T,H,V], g [B,T,H,K] decay logits, beta [B,T,H] logits, all raw: L2 norm
    (eps 1e-6), the gate lower_bound * sigmoid(exp(A_log) (g + dt_bias)) of eq. 5, lower_bound in
    [-5, 0), and the sigmoid of beta happen inside. A_log [H], dt_bias [H * K] or None, float32.
    scale None is K ** -0.5. initial_state [N,H,K,V] float32 or None; cu_seqlens [N + 1] for a
    packed row (then B = 1). state_positions [P]: flat token indices b * T + t whose states are
    wanted.

    Returns (o [B,T,H,V] in v's dtype, final state [N,H,K,V] float32 or None) and, if
    state_positions is given, the states after those tokens [P,H,K,V]. Raises InputError on a wrong
    shape and BackendError on a backend that cannot run here.
    """
    call = KdaCall(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        lower_bound,
        max(q.shape[-1], 1) ** -0.5 if scale is None else scale,
        initial_state,
        cu_seqlens,
        output_final_state,
        state_positions,
    )
    call.check()
    chosen = BACKENDS.resolve(
        backend,
        device=q.device,
        dtype=q.dtype,
        width=q.shape[-1],
        value_width=v.shape[-1],
        needs_grad=call.needs_grad,
        with_states=state_positions is not None,
    )
    return chosen.load()(call)


def kda_reference(call: KdaCall) -> Any:
    """The plain torch backend: chunkwise, or the recurrence for a few tokens."""
    from openk3.ops.kda import reference

    q, v = call.q, call.v
    lengths = sequence_lengths(q.shape[0], q.shape[1], call.cu_seqlens)
    active = reference.activate(
        *(q, call.k, v, call.g, call.beta, call.A_log, call.dt_bias),
        *(call.lower_bound, call.scale),
    )
    state = call.initial_state
    if state is None:
        state = torch.zeros(call.state_shape, device=q.device)
    few = max(lengths, default=0) < RECURRENT_BELOW
    form = reference.recurrent if few else reference.chunkwise
    state = state.to(active[0].dtype)
    with outside_autocast(q.device):
        o, final, states = form(*active, state, lengths, state_positions=call.state_positions)
    o = o.view(v.shape).to(v.dtype)
    last = final if call.output_final_state else None
    return (o, last) if call.state_positions is None else (o, last, states)
