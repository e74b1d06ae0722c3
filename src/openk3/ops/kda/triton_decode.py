"""Host side of the decoding kernels: triton_step for one token, triton_window for several."""

import torch
from torch import Tensor

from openk3.ops.kda.decode import TAPS, TILE, Step
from openk3.ops.kda.triton_math import COMPILED
from openk3.ops.kda.triton_step import step_kernel
from openk3.ops.kda.triton_window import window_kernel
from openk3.ops.triton_support import launch_named

# columns of a state at a time, loads ahead, warps: chosen by measurement on an H200
STEP = {"COLUMNS": 64, "num_warps": 4}
WINDOW = {"COLUMNS": 32, "STAGES": 2, "num_warps": 2}


@torch.no_grad()
def step_triton(step: Step) -> Tensor:
    """`decode.step_reference` in one kernel."""
    assert TAPS == 4, "the kernels spell out four taps"
    q, k, v, g, beta = (x.contiguous() for x in step.inputs)
    batch, tokens, heads, width = q.shape
    o = torch.empty_like(q, dtype=step.gate.dtype)
    common = {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "gate": step.gate.contiguous(),
        "taps": step.taps.float().contiguous(),
        "conv_state": step.conv_state,
        "state": step.state,
        "slots": step.slots,
        "A_log": step.A_log.float(),
        "dt_bias": step.dt_bias.float(),
        "norm_weight": step.norm_weight.float(),
        "o": o,
        "H": heads,
        "conv_stride": step.conv_state.stride(0),
        "state_stride": step.state.stride(0),
        "scale": step.scale,
        "lower_bound": step.lower_bound,
        "eps": step.eps,
        "D": width,
    }
    grid = (batch * heads,)
    if tokens == 1 and step.pending is None:
        tuning = STEP | {"COLUMNS": min(STEP["COLUMNS"], width)}
        launch_named(step_kernel, grid, **common, **tuning)
        return o
    pending = step.pending or [None] * 5
    old = zip(("old_q", "old_k", "old_v", "old_g", "old_beta"), pending, strict=True)
    launch_named(
        window_kernel,
        grid,
        **common,
        **dict(old),
        accepted=step.accepted,
        windows=step.windows,
        advance=step.advance,
        tokens=tokens,
        P=0 if step.pending is None else step.pending.q.shape[1],
        C=TILE,
        REPLAY=step.pending is not None,
        PRECISION="bf16x3" if COMPILED.value else "tf32x3",
        **WINDOW | {"COLUMNS": min(WINDOW["COLUMNS"], width)},
    )
    return o
