"""Keys of compiled kernels do not depend on what ran before; host tensors are refused."""

import importlib.util
import os
import subprocess
import sys

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


SPECIALISED = """
import importlib, pkgutil
import openk3.ops
from triton.runtime.jit import JITFunction

CALLED = {"first_slot", "locate", "request"}  # by kernels, whose compilation is theirs
COUNTS = {"T", "R", "tokens", "num_seqs", "segment", "num_blocks", "num_pairs", "table_width"}
for module in pkgutil.walk_packages(openk3.ops.__path__, "openk3.ops."):
    for name, kernel in vars(importlib.import_module(module.name)).items():
        if isinstance(kernel, JITFunction) and not name.startswith("_") and name not in CALLED:
            found = [p for p in kernel.params if p.name in COUNTS and not p.is_constexpr]
            if found and kernel.__module__ == module.name:
                print(name, *(p.name for p in found if not p.do_not_specialize))
"""


def test_no_kernel_is_compiled_anew_for_another_number_of_tokens():
    """As on a GPU, where Triton by itself tells 1, multiples of 16 and all others apart."""
    plain = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", SPECIALISED], env=plain, capture_output=True, text=True, check=True
    )
    found = {name: rest for name, *rest in map(str.split, run.stdout.splitlines())}
    assert {"prepare_kernel", "mix_forward", "norm_forward", "share_kernel"} <= found.keys()
    assert {name for name, rest in found.items() if rest} == set()
