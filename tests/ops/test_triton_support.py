"""Keys of compiled kernels do not depend on what ran before; host tensors are refused."""

import importlib.util

import pytest
import torch

from openk3.errors import BackendError
from openk3.ops.triton_support import has_triton, launch, launch_named, settle_key

if not has_triton():
    pytest.skip("Triton is not installed", allow_module_level=True)

KERNELS = """
import triton.language as tl
from triton.runtime.jit import JITFunction

ONE = tl.constexpr(1)

@JITFunction
def innermost(x):
    return x + ONE

@JITFunction
def inner(x):
    return innermost(x) * 2

@JITFunction
def first(p):
    tl.store(p, inner(tl.load(p)))

@JITFunction
def second(p):
    tl.store(p, innermost(inner(tl.load(p))))
"""


def compiled_kernels(folder):
    path = folder / "kernels.py"
    path.write_text(KERNELS)
    spec = importlib.util.spec_from_file_location("kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_key_on_disk_is_the_same_in_any_order(tmp_path):
    keys = []
    for order in (("first", "second"), ("second", "first")):
        module = compiled_kernels(tmp_path)
        for name in order:
            settle_key(getattr(module, name))
        keys.append({name: getattr(module, name).cache_key for name in order})
    assert keys[0] == keys[1]


def test_host_tensors_are_refused_by_compiled_kernels(tmp_path):
    kernel = compiled_kernels(tmp_path).first
    with pytest.raises(BackendError, match="a tensor is on cpu"):
        launch(kernel, (1,), torch.ones(1))
    with pytest.raises(BackendError, match="a tensor is on cpu"):
        launch_named(kernel, (1,), p=torch.ones(1))
