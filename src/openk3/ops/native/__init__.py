"""C++ kernels for passes over few tokens on a CPU, where Python between operations costs the most.

`build` compiles and loads them, `folder` keeps what was compiled, `program` records operations and
runs them, `source/` has the C++. They take the place of the operations' references one by one; who
records a whole model is `openk3.engine.native`.
"""

from typing import Any

import torch

from openk3.ops.backends import Backend, BackendTable, always
from openk3.ops.native import build

__all__ = ["BACKENDS", "TAPS"]

TAPS = 4


def _usable(
    *, device: torch.device, dtype: torch.dtype, taps: int = TAPS, **_: Any
) -> tuple[bool, str]:
    if device.type != "cpu":
        return False, f"the kernels are for CPUs, not {device.type}"
    if dtype != torch.float32 or taps != TAPS:
        return False, f"the kernels take float32 and {TAPS} taps, not {dtype} and {taps}"
    return build.available()


def _program() -> Any:
    from openk3.ops.native.program import Program

    return Program


BACKENDS = BackendTable(
    "cpu_step",
    [
        Backend("native", "a compiler for C++20: g++ 12 or newer, or clang++", _usable, _program),
        Backend("reference", "nothing", always, lambda: None),
    ],
)
"""Whether the engine's steps over few tokens run as one recorded program, or operation by
operation, each by its own table."""
