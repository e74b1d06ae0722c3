"""Host side of the decoding kernels: triton_step for one token, triton_window for several."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openk3.ops.kda.decode import TAPS, TILE, Pending, Step
from openk3.ops.kda.triton_math import COMPILED
from openk3.ops.kda.triton_step import step_kernel
from openk3.ops.kda.triton_window import window_kernel
from openk3.ops.triton_support import launch_named

assert TAPS == 4, "the kernels spell out four taps"
# columns of a state at a time, loads ahead, warps: chosen by measurement on an H200
STEP = {"COLUMNS": 64, "num_warps": 4}
WINDOW = {"COLUMNS": 32, "STAGES": 2, "num_warps": 2}


@torch.no_grad()
def step_triton(step: Step) -> Tensor:
    """The `triton` backend: one launch, or two if pending and new tokens exceed a tile."""
    tokens = step.inputs[0].shape[1]
    if step.pending is None:
        return _one(step) if tokens == 1 else _several(step, step.inputs, None, None, step.advance)
    if tokens + step.pending.q.shape[1] <= TILE:
        return _several(step, step.inputs, step.pending, step.accepted, step.advance)
    assert step.accepted is not None
    rows = step.windows.long()
    rejected = torch.arange(step.pending.q.shape[1], device=rows.device) >= step.accepted[:, None]
    seen = [
        x[rows].masked_fill(rejected.view(*rejected.shape, *[1] * (x.ndim - 2)), 0.0)
        for x in step.pending
    ]
    _several(step, seen, None, None, step.accepted)
    return _several(step, step.inputs, step.pending, None, step.advance)


def _one(step: Step) -> Tensor:
    args = _common(step, step.inputs)
    tuning = STEP | {"COLUMNS": min(STEP["COLUMNS"], args["D"])}
    launch_named(step_kernel, _grid(step), **args, **tuning)
    return args["o"]


def _several(
    step: Step,
    inputs: Sequence[Tensor],
    pending: Pending | None,
    accepted: Tensor | None,
    advance: Tensor | None,
) -> Tensor:
    args = _common(step, inputs)
    old = zip(("old_q", "old_k", "old_v", "old_g", "old_beta"), pending or [None] * 5, strict=True)
    launch_named(
        window_kernel,
        _grid(step),
        **args,
        **dict(old),
        accepted=accepted,
        windows=step.windows,
        advance=advance,
        tokens=inputs[0].shape[1],
        P=0 if pending is None else pending.q.shape[1],
        C=TILE,
        PRECISION="bf16x3" if COMPILED.value else "tf32x3",
        **WINDOW | {"COLUMNS": min(WINDOW["COLUMNS"], args["D"])},
    )
    return args["o"]


def _grid(step: Step) -> tuple[int]:
    batch, _, heads, _ = step.inputs[0].shape
    return (batch * heads,)


def _taps(taps: Sequence[Tensor]) -> dict[str, Any]:
    """The convolutions' weights [W, H, D], with their strides from tap to tap and by channel."""
    first = taps[0]
    regular = first.stride(1) == first.shape[2] * first.stride(2)
    if not regular or any(w.stride() != first.stride() or w.dtype != first.dtype for w in taps):
        taps = [w.float().contiguous() for w in taps]
    named = dict(zip(("taps_q", "taps_k", "taps_v"), taps, strict=True))
    return named | {"tap_step": taps[0].stride(0), "channel_step": taps[0].stride(2)}


def _common(step: Step, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """What both kernels take. An output gate shorter than the inputs is one nobody asks for."""
    q, k, v, g, beta = (x.contiguous() for x in inputs)
    gate = step.gate.contiguous() if step.gate.shape == q.shape else q
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "gate": gate,
        **_taps(step.taps),
        "conv_state": step.conv_state,
        "state": step.state,
        "slots": step.slots,
        "A_log": step.A_log.float(),
        "dt_bias": step.dt_bias.float(),
        "norm_weight": step.norm_weight.float(),
        "o": torch.empty_like(q, dtype=step.gate.dtype),
        "H": q.shape[2],
        "conv_stride": step.conv_state.stride(0),
        "state_stride": step.state.stride(0),
        "scale": step.scale,
        "lower_bound": step.lower_bound,
        "eps": step.eps,
        "D": q.shape[3],
    }
