"""Building: once, safely beside other processes, and with a reason where it is not possible."""

import logging
import os
import select
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
    usable, reason = build.available()
    assert not usable
    assert "is not this user's" in reason
    with pytest.raises(BackendError, match="is not this user's"):
        build._load()


@needs_compiler
@pytest.mark.parametrize(
    ("mode", "of_parent", "said"),
    [
        (0o700, 0o755, None),
        (0o755, 0o1777, None),
        (0o770, 0o755, "others may write"),
        (0o777, 0o755, "others may write"),
        (0o700, 0o777, "others may replace"),
    ],
)
def test_a_folder_that_others_can_fill_is_not_used(mode, of_parent, said):
    folder = build.cache_folder()
    folder.mkdir(parents=True)
    folder.chmod(mode)
    folder.parent.chmod(of_parent)
    if said is None:
        assert build._load().answer() == 42
        return
    with pytest.raises(BackendError, match=f"{said}.*OPENK3_CACHE"):
        build._load()
    assert libraries() == []


@needs_compiler
def test_what_is_built_is_for_this_user_alone():
    before = os.umask(0)
    try:
        build._load()
    finally:
        os.umask(before)
    [path] = libraries()
    assert path.stat().st_mode & 0o077 == path.parent.stat().st_mode & 0o077 == 0


@needs_compiler
def test_files_that_others_may_write_links_and_folders_are_not_loaded():
    build._load()
    [path] = libraries()
    path.chmod(0o666)
    assert "builds it on first use" in build.available()[1]
    path.rename(path.parent / "real")
    path.symlink_to("real")
    assert "builds it on first use" in build.available()[1]
    path.unlink()
    path.mkdir(mode=0o700)
    assert "builds it on first use" in build.available()[1]
    path.rmdir()
    path.symlink_to("nowhere")
    assert build._load().answer() == 42


@needs_compiler
@pytest.mark.parametrize("place", ["~", "cache"])
def test_a_cache_that_depends_on_the_working_folder_is_refused(monkeypatch, place):
    monkeypatch.setenv("OPENK3_CACHE", place)
    with pytest.raises(BackendError, match="depends on where the program is started"):
        build._load()


def script(path, *lines):
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize("lines", [["exit 1"], ["sleep 1000"], ["kill -9 $$"]])
def test_a_compiler_that_cannot_say_its_version(tmp_path, monkeypatch, lines):
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", *lines))
    monkeypatch.setattr("openk3.ops.native.compiler.VERSION_S", 0.5)
    usable, reason = build.available()
    assert not usable
    assert "does not say its version" in reason


def test_a_file_that_is_no_program(tmp_path, monkeypatch):
    (tmp_path / "cxx").write_bytes(b"\x7fELF but not really")
    (tmp_path / "cxx").chmod(0o700)
    monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    assert "does not say its version" in build.available()[1]
    monkeypatch.setenv("CXX", "'g++")
    assert "no C++ compiler" in build.available()[1]


def test_a_compiler_that_hangs_is_ended_with_all_it_started(tmp_path, monkeypatch):
    """As a driver's does, its child holds the pipes open; this one another as well."""
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    ended = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    lines = ['[ "$1" = --version ] && exec echo one', f"sleep 1000 3> {alive} &", "wait"]
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", *lines))
    monkeypatch.setattr(build, "COMPILE_S", 3)
    with pytest.raises(BackendError, match="took longer than 3 s"):
        build._load()
    assert select.select([ended], [], [], 60)[0], "the child goes on"
    os.close(ended)
    assert libraries() == []


@needs_compiler
def test_built_beside_other_work(small, caplog):
    with caplog.at_level(logging.WARNING):
        thread = build.build_later()
        assert thread is not None
        thread.join(60)
    assert caplog.text == ""  # nobody waits
    assert len(libraries()) == 1
    assert build.build_later() is None
    assert build._load().answer() == 42
    (small / build.MAIN).write_text("#error cannot be\n")
    thread = build.build_later()
    assert thread is not None
    thread.join(60)
    assert build.build_later() is None
    assert "cannot be" in build.available()[1]


LATE_START = """
import subprocess, threading
from pathlib import Path
from openk3.ops.native import build

class Popen(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if threading.current_thread() is not threading.main_thread():
            threading.main_thread().join()

subprocess.Popen = Popen
build.SOURCES = Path({sources!r})
build.build_later()
with open({alive!r}) as running:
    running.read(1)
"""
"""The program ends at the worst moment: the compiler runs, and its thread does not yet know."""


def test_a_build_beside_other_work_ends_with_the_program(tmp_path, small):
    alive, code = tmp_path / "alive", tmp_path / "program.py"
    os.mkfifo(alive)
    ended = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    lines = ['[ "$1" = --version ] && exec echo one', f"exec 3> {alive}", "echo >&3", "sleep 1000"]
    code.write_text(LATE_START.format(sources=str(small), alive=str(alive)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
                   "CXX": script(tmp_path / "cxx", *lines)}  # fmt: skip
    subprocess.run([sys.executable, str(code)], env=environment, check=True, timeout=60)
    assert select.select([ended], [], [], 60)[0], "the compiler goes on"
    os.close(ended)
    assert libraries() == []


@needs_compiler
def test_what_a_killed_build_left_is_swept_away():
    old, new = (build.cache_folder() / f".build-{name}" for name in ("old", "new"))
    for left in (old, new):
        left.mkdir(parents=True)
        (left / "made.so").write_text("half")
    build.cache_folder().chmod(0o700)
    os.utime(old, (0, 0))
    build._load()
    assert not old.exists()
    assert new.exists()


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
