"""One decoding step of a KDA layer between its projections: convolution, norms, gate, recurrence,
head norm and output gate, in place on paged state slots (K3 report §2.1.1; drafts: §5.4.2).

Drafts: a speculative window must not advance the state before it is accepted. With `pending`, a
call first replays the accepted prefix of the last window onto the checkpoint state, from that
window's cached projected inputs, then runs the new window from there without storing its state,
and caches its inputs instead. Rejecting costs nothing: the checkpoint has not moved.

Legend: B rows, T new tokens, H heads, D = K = V head width, W = 4 taps, S slots, P window capacity.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openk3.errors import InputError
from openk3.ops.backends import triton_or_reference
from openk3.ops.checks import check_distinct, check_range, check_tensor, readable
from openk3.ops.triton_support import triton_runs

TAPS = 4
TILE = 16  # tokens that the kernel for several runs at once


class Pending(NamedTuple):
    """Projected inputs of the last window of W sequences, before the convolution."""

    q: Tensor
    """[W, P, H, D]"""
    k: Tensor
    """[W, P, H, D]"""
    v: Tensor
    """[W, P, H, D]"""
    g: Tensor
    """[W, P, H, D] decay logits"""
    beta: Tensor
    """[W, P, H] logits"""


class Step(NamedTuple):
    """Checked arguments of one call, as a backend receives them."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    """q, k, v, g [B,T,H,D] and beta [B,T,H]"""
    gate: Tensor
    """[B,T,H,D] output gate logits"""
    taps: tuple[Tensor, ...]
    """[W, H, D] each, of the convolutions of q, k and v; views of however they are stored"""
    conv_state: Tensor
    """[S, 3, W, H, D]"""
    state: Tensor
    """[S, H, K, V] float32"""
    slots: Tensor
    """[B] int32"""
    A_log: Tensor
    """[H]"""
    dt_bias: Tensor
    """[H * D]"""
    lower_bound: float
    scale: float
    norm_weight: Tensor
    """[D]"""
    eps: float
    pending: Pending | None
    accepted: Tensor | None
    """[B] int32"""
    windows: Tensor
    """[B] int32, rows of `pending`"""
    advance: Tensor | None
    """[B] int32"""


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
    Raises InputError, BackendError.
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
    _check(step)
    dense = {n: getattr(step, n).contiguous() for n in ("A_log", "dt_bias", "norm_weight")}
    for n in ("slots", "accepted", "windows", "advance"):
        numbers = getattr(step, n)
        dense[n] = None if numbers is None else numbers.int().contiguous()
    step = step._replace(**dense)
    window = q.shape[1] if pending is None else pending.q.shape[1]
    return BACKENDS.resolve(backend, device=q.device, width=width, window=window).load()(step)


def _check(step: Step) -> None:
    q = step.inputs[0]
    batch, tokens, heads, width = q.shape
    num = step.state.shape[0]
    wanted = {
        "q": (q, q.shape),
        "k": (step.inputs[1], q.shape),
        "v": (step.inputs[2], q.shape),
        "g": (step.inputs[3], q.shape),
        "beta": (step.inputs[4], q.shape[:3]),
        "gate": (step.gate, q.shape),
        **{f"conv_weight[{i}]": (w, (TAPS, heads, width)) for i, w in enumerate(step.taps)},
        "conv_state": (step.conv_state, (num, 3, TAPS, heads, width)),
        "state": (step.state, (num, heads, width, width)),
        "A_log": (step.A_log, (heads,)),
        "dt_bias": (step.dt_bias, (heads * width,)),
        "norm_weight": (step.norm_weight, (width,)),
    }
    numbers = {"slots": step.slots, "windows": step.windows}
    if (step.pending is None) != (step.accepted is None):
        raise InputError("pending and accepted belong together; one of them is missing")
    if step.pending is None and step.advance is not None:
        raise InputError("advance is for rows with a pending window; others advance by every token")
    if step.pending is not None:
        many, capacity = step.pending.q.shape[:2]
        if tokens > capacity:
            raise InputError(f"{tokens} new tokens do not fit a pending window of {capacity}")
        for name, x in step.pending._asdict().items():
            wanted[f"pending.{name}"] = x, (many, capacity, heads, width)[: 3 + (name != "beta")]
            if not x.is_contiguous():
                raise InputError(f"pending.{name} is written in place: it must be contiguous")
        numbers["accepted"] = step.accepted
    if step.advance is not None:
        numbers["advance"] = step.advance
    for name, (x, shape) in wanted.items():
        check_tensor(name, x, shape, q.device)
    for name, x in numbers.items():
        check_tensor(name, x, (batch,), q.device, kind="integer")
    for name, x in (("state", step.state), ("conv_state", step.conv_state)):
        if x.shape[0] and not x[0].is_contiguous():
            raise InputError(f"{name} is written in place: each slot must be contiguous")
    if step.state.dtype != torch.float32:
        raise InputError(f"state must be float32, not {step.state.dtype}")
    if not -5.0 <= step.lower_bound < 0:
        raise InputError(f"lower_bound must lie in [-5, 0), not be {step.lower_bound}")
    if readable(step.slots):
        _check_values(step)


def _check_values(step: Step) -> None:
    """Slots and counts of the rows that are no padding."""
    real = step.slots >= 0
    tokens, num = step.inputs[0].shape[1], step.state.shape[0]
    check_range("slots", step.slots[real], 0, num)
    check_distinct("slots", step.slots[real])
    if step.pending is None or step.accepted is None:
        return
    many, capacity = step.pending.q.shape[:2]
    check_range("windows", step.windows[real], 0, many)
    check_distinct("windows", step.windows[real])
    check_range("accepted", step.accepted[real], 0, capacity + 1)
    if step.advance is not None:
        check_range("advance", step.advance[real], 0, tokens + 1)
