"""The agent's own Python, one read-only layer under every template.

It is this machine's interpreter with its loader, the few modules the agent imports (one
uncompressed zip, so that starting costs few file system calls) and the agent. Nothing of it depends
on what the template holds: a template needs no Python and no libc of its own.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from functools import lru_cache
from pathlib import Path

from openk3._io import atomic_dir
from openk3.errors import BackendError
from openk3.sandbox.templates import pyzip
from openk3.sandbox.templates.elf import libraries, loader_name

SOURCE_ROOT = Path(__file__).resolve().parents[3]  # the folder that holds `openk3`
ENTRY = "openk3.sandbox.agent.main"

_LIST_MODULES = f"""
import sys
sys.path.insert(0, {str(SOURCE_ROOT)!r})
import {ENTRY}, encodings.utf_8, encodings.ascii, encodings.latin_1, json, zipimport
print(json.dumps([[name, module.__file__] for name, module in sys.modules.items()
                  if getattr(module, "__file__", None)]))
"""


def base_python() -> Path:
    """The real interpreter behind a virtual environment."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for place in (Path(sys.base_prefix) / "bin" / name, Path(sys.executable)):
        if place.exists():
            return place.resolve()
    raise BackendError(f"no interpreter under {sys.base_prefix}")


@lru_cache(maxsize=1)
def runtime_id() -> str:
    """Changes with the interpreter and with every line of the agent."""
    digest = hashlib.sha256(f"{sys.version} {base_python()}".encode())
    sandbox = SOURCE_ROOT / "openk3" / "sandbox"
    for source in [
        sandbox / "frames.py",
        Path(__file__),
        *sorted((sandbox / "agent").glob("*.py")),
    ]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def agent_argv() -> list[str]:
    """How process 1 is started inside the sandbox."""
    start = f"import sys; sys.dont_write_bytecode = True; from {ENTRY} import main; main()"
    python = ["/.k3/bin/python3", "-I", "-S", "-B", "-X", "utf8", "-c", start]
    return ["/.k3/lib/ld.so", "--library-path", "/.k3/lib", *python]


def build(folder: Path) -> Path:
    """Make (once) and return the layer for the current `runtime_id()` below `folder`."""
    layer = folder / runtime_id()
    if layer.exists():
        return layer
    try:
        with atomic_dir(layer) as aside:
            _fill(aside / ".k3")
    except OSError:
        if not layer.exists():  # another process may have made it meanwhile
            raise
    return layer


def _fill(root: Path) -> None:
    python = base_python()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    dynload = root / "lib" / version / "lib-dynload"
    dynload.mkdir(parents=True)
    (root / "bin").mkdir()
    _copy(python, root / "bin" / "python3")
    modules = json.loads(
        subprocess.run(
            [str(python), "-I", "-S", "-X", "utf8", "-c", _LIST_MODULES],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    place = root / "lib" / f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    with zipfile.ZipFile(place, "w", zipfile.ZIP_STORED) as archive:
        for name, file in sorted(dict(modules).items()):
            if file.endswith(".py"):
                package = "/__init__.py" if file.endswith("__init__.py") else ".py"
                inner = name.replace(".", "/") + package
                pyzip.add_module(archive, Path(file), inner, with_source=False)
            else:
                _copy(Path(file), dynload / os.path.basename(file))
    _copy_libraries(root, python, *dynload.iterdir())
    # getpath recognises its home by this file; the zip comes first on sys.path
    shutil.copyfile(os.__file__, root / "lib" / version / "os.py")


def _copy(source: Path, target: Path) -> None:
    if not target.exists():
        shutil.copy2(os.path.realpath(source), target)


def _copy_libraries(root: Path, *programs: Path) -> None:
    found = libraries(*programs)
    loader = loader_name(found)
    if loader:
        _copy(Path(loader), root / "lib" / "ld.so")
    for name, path in found.items():
        if str(path) != loader:
            _copy(path, root / "lib" / os.path.basename(name))
