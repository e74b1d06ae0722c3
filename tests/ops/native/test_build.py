"""Building: once, safely beside other processes, and with a reason where it is not possible."""

import logging
import os
import subprocess
import sys

import pytest

from openk3.errors import BackendError
from openk3.ops.native import build

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
SMALL = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """A source that compiles at once, a cache of its own, and no memory of failures."""
    sources = tmp_path / "source"
    sources.mkdir()
    (sources / build.MAIN).write_text(SMALL)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "_failure", [])
    monkeypatch.setenv("OPENK3_CACHE", str(tmp_path / "cache"))
    return sources


def libraries():
    return sorted(build.cache_folder().iterdir())


@needs_compiler
def test_built_once_and_said(caplog):
    assert "builds it on first use" in build.available()[1]
    with caplog.at_level(logging.INFO):
        assert build._load().answer() == 42
        assert caplog.text.count("compiling the CPU kernels") == 1
        assert build._load().answer() == 42
    assert caplog.text.count("compiling the CPU kernels") == 1
    [path] = libraries()
    assert build.available() == (True, f"built: {path}")


@needs_compiler
def test_other_sources_flags_or_processors_are_other_libraries(small, monkeypatch):
    build._load()
    (small / build.MAIN).write_text(SMALL.replace("42", "43"))
    assert build._load().answer() == 43
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-DOTHER"])
    build._load()
    monkeypatch.setattr(build, "_processor", lambda: "another")
    build._load()
    assert len(libraries()) == 4


@needs_compiler
@pytest.mark.parametrize("damage", [b"", b"not a library", None])
def test_a_damaged_library_is_built_again(damage):
    build._load()
    [path] = libraries()
    whole = path.read_bytes()
    path.unlink()  # the loaded one stays as it is in memory
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert "builds it on first use" in build.available()[1]
    assert build._load().answer() == 42
    assert path.read_bytes() == whole


@needs_compiler
def test_a_library_of_somebody_else_is_not_loaded(monkeypatch):
    build._load()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert "builds it on first use" in build.available()[1]


@needs_compiler
def test_processes_may_build_at_once(small, tmp_path):
    code = (
        "from pathlib import Path; from openk3.ops.native import build; "
        f"build.SOURCES = Path({str(small)!r}); assert build._load().answer() == 42"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    names = [path.name for path in libraries()]
    assert names
    assert all(name.endswith(".so") and not name.startswith(".") for name in names)
    assert build._load().answer() == 42


@pytest.mark.parametrize(("path", "cxx"), [("/nowhere", ""), (None, "no-such-compiler")])
def test_no_compiler(monkeypatch, path, cxx):
    monkeypatch.setenv("CXX", cxx)
    if path:
        monkeypatch.setenv("PATH", path)
    usable, reason = build.available()
    assert not usable
    assert "no C++ compiler" in reason
    with pytest.raises(BackendError, match="no C\\+\\+ compiler"):
        build._load()


@needs_compiler
def test_what_does_not_compile_is_said_and_not_tried_again(small, monkeypatch):
    (small / build.MAIN).write_text("#error cannot be\n")
    build.load.cache_clear()
    with pytest.raises(BackendError, match="cannot be"):
        build.load()
    assert libraries() == []
    usable, reason = build.available()
    assert not usable
    assert "cannot be" in reason
    monkeypatch.setattr(build, "_load", lambda: pytest.fail("tried again"))
    with pytest.raises(BackendError, match="cannot be"):
        build.load()


@needs_compiler
@pytest.mark.parametrize("first", ["-fno-such-thing", "-DMISSING"])
def test_a_compiler_without_openmp_builds_for_one_thread(small, monkeypatch, first):
    """It refuses the flag, or makes a library that lacks a function."""
    lacks = "#ifdef MISSING\nint lost(); int use = lost();\n#endif\n"
    (small / build.MAIN).write_text(lacks + SMALL)
    monkeypatch.setattr(build, "OPENMP", (first, "-fopenmp-simd"))
    assert build._load().answer() == 42


@needs_compiler
def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPENK3_CACHE", str(tmp_path / "file"))
    with pytest.raises(BackendError, match="cannot keep a compiled library"):
        build._load()
