"""The package root and the command line stay light; errors keep their promises."""

import pickle
import subprocess
import sys

import pytest

from openk3 import errors


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_help_loads_no_torch():
    out = run_python(
        "import sys, openk3.cli as c; c.main(['--help']); print('torch' in sys.modules)"
    )
    assert out.startswith("usage: k3 VERB")
    assert out.strip().endswith("False")


@pytest.mark.parametrize("folder", ["errors", "_io", "config", "obs", "text", "sandbox", "fleet"])
def test_light_folders_load_no_torch(folder):
    assert run_python(f"import sys, openk3.{folder}; print('torch' in sys.modules)") == "False\n"


def test_every_error_is_a_builtin_too_and_pickles():
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and value is not errors.OpenK3Error
    ]
    assert len(classes) >= 6
    for kind in classes:
        assert issubclass(kind, errors.OpenK3Error)
        assert kind.__bases__[1].__module__ == "builtins"
        copy = pickle.loads(pickle.dumps(kind("tensor x: 3 given, 4 allowed")))
        assert type(copy) is kind
        assert "3 given" in str(copy)
