"""Triton kernels run in Triton's CPU interpreter where there is no GPU.

The variable must be set before a kernel module is imported; kernel modules are imported lazily.
"""

import os
from importlib.util import find_spec

import torch

if not torch.cuda.is_available() and find_spec("triton"):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _fix_interpreter_loops() -> None:
    """Triton 3.6's interpreter has loop bounds of shape [1], which NumPy >= 2.4 rejects."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if os.environ.get("TRITON_INTERPRET") == "1":
    _fix_interpreter_loops()
