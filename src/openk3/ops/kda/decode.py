"""One decoding step of a KDA layer between its projections: convolution, norms, gate, recurrence,
head norm and output gate, in place on paged state slots (K3 report §2.1.1; drafts: §5.4.2).

Drafts: a speculative window must not advance the state before it is accepted. With `pending`, a
call first replays the accepted prefix of the last window onto the checkpoint state, from that
window's cached projected inputs, then runs the new window from there without storing its state,
and caches its inputs instead. Rejecting costs nothing: the checkpoint has not moved.

Legend: B rows, T new tokens, H heads, D = K = V head width, W = 4 taps, S slots, P window capacity.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openk3.errors import InputError
from openk3.ops.backends import triton_or_reference
from openk3.ops.kda.decode_step import TAPS, Pending, Step
from openk3.ops.triton_support import triton_runs

TILE = 16  # tokens that the kernel for several runs at once


def _reference() -> Any:
    from openk3.ops.kda.decode_reference import step_reference

    return step_reference


def _triton() -> Any:
    from openk3.ops.kda.triton_decode import step_triton

    return step_triton


def _triton_usable(
    *, device: torch.device, width: int, window: int = 1, **_: Any
) -> tuple[bool, str]:
    if width not in (64, 128):
        return False, f"the kernels take head widths of 64 or 128, not {width}"
    if window > TILE:
        return False, f"the kernel takes windows of {TILE} tokens, not of {window}"
    return triton_runs(device)


BACKENDS = triton_or_reference("kda_decode", _triton_usable, _triton, _reference)


def pack_taps(conv_weights: Sequence[Tensor], heads: int) -> Tensor:
    """Weights [H * D, 1, W] of q, k and v -> [3, W, H, D] float32, which kernels read fastest."""
    return torch.stack(_by_tap(conv_weights, heads)).float().contiguous()


def _by_tap(conv_weights: Sequence[Tensor], heads: int) -> tuple[Tensor, ...]:
    """Weights [H * D, 1, W] each -> views [W, H, D]."""
    if len(conv_weights) != 3:
        raise InputError(f"conv_weight must be three weights, not {len(conv_weights)}")
    for w in conv_weights:
        if w.ndim != 3 or w.shape[1] != 1 or w.shape[0] % heads:
            raise InputError(f"a conv_weight must be [H * D, 1, {TAPS}], not {list(w.shape)}")
    return tuple(w[:, 0].unflatten(0, (heads, -1)).permute(2, 0, 1) for w in conv_weights)


def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    gate: Tensor,
    *,
    conv_weight: Tensor | Sequence[Tensor],
    conv_state: Tensor,
    state: Tensor,
    slots: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    norm_weight: Tensor,
    eps: float = 1e-5,
    scale: float | None = None,
    pending: Pending | None = None,
    accepted: Tensor | None = None,
    windows: Tensor | None = None,
    advance: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """T new tokens of B sequences: projections in, gated and normed heads out. No gradients.

    q, k, v, g, gate [B,T,H,D] and beta [B,T,H]: projections of the new tokens, raw. conv_weight:
    [3,W,H,D] from `pack_taps`, or three [H * D, 1, W], read where they lie. conv_state [S,3,W,H,D]:
    the last W inputs of the three convolutions. state [S,H,K,V] float32. slots [B]: where each
    row's states live, -1 for padding (its output is zero); no slot twice. Slots may lie apart, each
    is contiguous. A_log [H], dt_bias [H * D], norm_weight [D]; scale None is D ** -0.5.

    Without `pending`, conv_state and state advance in place by the T tokens. With it, they
    advance by the first accepted[b] tokens (0 to P) of the row's pending window, the T <= P new
    tokens run from there, and become the pending window. windows [B] names that window; None is
    the slot's. With advance [B] the states move on by the first advance[b] of the new tokens at
    once (0 to T; the row's next `accepted` must then be less by as many, counted from there, that
    is 0). T and P are at most 16 for the kernels. Returns o [B,T,H,D] in gate's dtype.
    Raises InputError, BackendError; on a GPU the values of slots and counts are trusted.
    """
    if q.ndim != 4 or 0 in q.shape[1:]:
        raise InputError(f"q must be [B, T, H, D], none of T, H, D zero; not {list(q.shape)}")
    heads, width = q.shape[2:]
    packed = isinstance(conv_weight, Tensor)
    if packed and conv_weight.ndim != 4:
        raise InputError(f"conv_weight must be [3, W, H, D], not {list(conv_weight.shape)}")
    step = Step(
        (q, k, v, g, beta),
        gate,
        conv_weight.unbind(0) if packed else _by_tap(conv_weight, heads),
        conv_state,
        state,
        slots,
        A_log,
        dt_bias,
        lower_bound,
        width**-0.5 if scale is None else scale,
        norm_weight,
        eps,
        pending,
        accepted,
        slots if windows is None else windows,
        advance,
    )
    step.check()
    window = q.shape[1] if pending is None else pending.q.shape[1]
    return BACKENDS.resolve(backend, device=q.device, width=width, window=window).load()(
        step.dense()
    )
