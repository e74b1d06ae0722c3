"""No submodule takes the name of a function that the package exports."""

import importlib
import pkgutil
import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["attn_res", "kda", "mla", "moe", "mx", "norm"])
def test_submodules_do_not_shadow_functions(package):
    module = importlib.import_module(f"openk3.ops.{package}")
    submodules = {info.name for info in pkgutil.iter_modules(module.__path__)}
    functions = {name for name, x in vars(module).items() if callable(x) and name[0] != "_"}
    assert functions
    assert not submodules & functions


def test_importing_the_model_does_not_import_a_compiler():
    """They take seconds and 200 MB of address space that most commands never need."""
    code = "import sys, openk3.model; print([m for m in HEAVY if m in sys.modules])"
    heavy = "HEAVY = ('torch._dynamo', 'torch._inductor', 'sympy', 'triton'); "
    done = subprocess.run(
        [sys.executable, "-c", heavy + code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
