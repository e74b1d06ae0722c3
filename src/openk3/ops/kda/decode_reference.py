"""Decoding in plain torch (see `decode`): the recurrence, for all rows at once.

Legend: B rows, T tokens, H heads, D = K = V head width, W = 4 taps.
"""

from typing import Any

import torch
from torch import Tensor

from openk3.ops.kda import reference
from openk3.ops.kda.decode_step import TAPS, Step
from openk3.ops.norm import gated_head_norm
from openk3.ops.precision import outside_autocast


@torch.no_grad()
def step_reference(step: Step) -> Tensor:
    """Plain torch, all rows at once."""
    real = step.slots >= 0
    out = torch.zeros_like(step.gate)
    with outside_autocast(out.device):
        if not bool(real.all()):
            if bool(real.any()):
                out[real] = _rows(step, step.slots[real].long(), real)
            return out
        return _rows(step, step.slots.long(), slice(None)) if len(out) else out


def _rows(step: Step, slots: Tensor, rows: Any) -> Tensor:
    """The rows whose states live in `slots`."""
    new = [x[rows] for x in step.inputs]
    S, tails = step.state[slots], step.conv_state[slots]
    if step.pending is None or step.accepted is None:
        o, S, history = _run(step, new, S, tails)
        tails = history[:, :, -TAPS:]
    else:
        accepted = step.accepted[rows].long()
        windows = step.windows[rows].long()
        S, tails = _replay(step, [x[windows] for x in step.pending], accepted, S, tails)
        o = _run(step, new, S, tails)[0]
        if step.advance is not None:
            S, tails = _replay(step, new, step.advance[rows].long(), S, tails)
        for cache, x in zip(step.pending, new, strict=True):
            cache[windows, : x.shape[1]] = x.to(cache.dtype)
    step.state[slots], step.conv_state[slots] = S, tails.to(step.conv_state.dtype)
    return gated_head_norm(o, step.norm_weight, step.gate[rows], step.eps)


def _replay(
    step: Step, window: list[Tensor], accepted: Tensor, S: Tensor, tails: Tensor
) -> tuple[Tensor, Tensor]:
    """States after the first `accepted` [B] tokens of each row's window."""
    longest = int(accepted.max())
    if longest == 0:
        return S, tails
    seen = torch.arange(longest, device=accepted.device) < accepted[:, None]
    unused = [(~seen).view(*seen.shape, *[1] * (x.ndim - 2)) for x in window]
    window = [x[:, :longest].masked_fill(u, 0.0) for x, u in zip(window, unused, strict=True)]
    _, S, history = _run(step, window, S, tails, seen)
    last = accepted[:, None] + torch.arange(TAPS, device=accepted.device)
    index = last[:, None, :, None, None].expand(-1, 3, -1, *history.shape[3:])
    return S, history.gather(2, index)


def _run(
    step: Step, inputs: list[Tensor], S: Tensor, tails: Tensor, seen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """T tokens through convolution and recurrence: (o [B,T,H,D], S, inputs seen [B,3,W+T,H,D]).

    With `seen` [B,T] only the tokens where it is True change the state S [B,H,K,V].
    """
    *qkv, g, beta = inputs
    history = torch.cat([tails, torch.stack(qkv, 1)], 2)
    tokens = g.shape[1]
    taps = torch.stack(step.taps).float()[:, :, None]
    y = history[:, :, 1 : 1 + tokens].float() * taps[:, 0]
    for j in range(1, TAPS):
        y = torch.addcmul(y, history[:, :, 1 + j : 1 + j + tokens].float(), taps[:, j])
    q, k, v = torch.nn.functional.silu(y).to(g.dtype).unbind(1)
    gates = step.A_log, step.dt_bias, step.lower_bound, step.scale
    q, k, v, decay, b = reference.activate(q, k, v, g, beta, *gates)
    if seen is not None:
        decay, b = decay * seen[..., None, None], b * seen[..., None]
    outs = []
    for t in range(tokens):
        S = S * decay[:, t].exp()[..., None]
        key = k[:, t, :, :, None]
        error = (v[:, t, :, None] - key.transpose(-1, -2) @ S) * b[:, t, :, None, None]
        S = torch.addcmul(S, key, error)
        outs.append((q[:, t, :, None] @ S)[:, :, 0])
    return torch.stack(outs, 1).to(g.dtype), S, history
