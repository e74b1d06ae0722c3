"""No submodule takes the name of a function that the package exports."""

import importlib
import pkgutil

import pytest


@pytest.mark.parametrize("package", ["attn_res", "kda", "mla", "moe", "mx", "norm"])
def test_submodules_do_not_shadow_functions(package):
    module = importlib.import_module(f"openk3.ops.{package}")
    submodules = {info.name for info in pkgutil.iter_modules(module.__path__)}
    exported = {name for name in getattr(module, "__all__", []) if callable(getattr(module, name))}
    assert not submodules & exported
