"""Builds the C++ of `source/` with the machine's compiler, once, and loads it.

A library lies in the cache folder under a name made of everything that went into it (sources,
flags, compiler, processor) and of a digest of its own bytes: a file that was cut short or changed
is not loaded but built again. It is written aside and renamed, so that processes that build at
once do not disturb each other. What is loaded is run: only a folder that nobody but this user can
put files into is used. Nothing but a C++20 compiler is needed; without one the reference in Python
runs.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from openk3.errors import BackendError
from openk3.ops.native.compiler import find_compiler, run, version

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "source"
MAIN = "native.cpp"
FLAGS = (
    "-std=c++20 -O3 -march=native -fno-math-errno -fno-trapping-math -shared -fPIC -pthread"
).split()
OPENMP = ("-fopenmp", "-fopenmp-simd")
"""The second, one thread alone, for compilers that come without OpenMP's library."""
COMPILE_S = 300
ABANDONED_S = 3600
"""Age of files of a build that was killed."""
_failure: list[str] = []
"""Why building failed in this process: it is not tried again."""


def available() -> tuple[bool, str]:
    """Whether the library is there or could be built, and why. Builds nothing."""
    if _failure:
        return False, _failure[0]
    try:
        compiler, folder, key = _needs()
    except BackendError as error:
        return False, str(error)
    known = _cached(folder, key)
    if known is not None:
        return True, f"built: {known}"
    return True, f"{shlex.join(compiler)} builds it on first use, in seconds"


@functools.cache
def load() -> ctypes.CDLL:
    """The library, built if need be. Raises BackendError, the same again once building failed."""
    if _failure:
        raise BackendError(_failure[0])
    try:
        return _load()
    except BackendError as error:
        _failure.append(str(error))
        raise


def build_later() -> threading.Thread | None:
    """Build the library beside other work, until the program ends.

    Returns the thread that waits for it; None where there is nothing to build. If it fails there,
    `load` will say why.
    """
    try:
        compiler, folder, key = _needs()
    except BackendError:
        return None
    if _failure or _cached(folder, key):
        return None

    def work() -> None:
        try:
            _build(compiler, folder, key, logging.INFO)
        except BackendError as error:
            _failure.append(str(error))

    thread = threading.Thread(target=work, name="compiler", daemon=True)
    thread.start()
    return thread


def _load() -> ctypes.CDLL:
    compiler, folder, key = _needs()
    path = _cached(folder, key) or _build(compiler, folder, key)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendError(f"{path} cannot be loaded: {error}") from error


def _needs() -> tuple[list[str], Path, str]:
    """Compiler, folder and key. Raises BackendError if one is missing or not to be trusted."""
    compiler = find_compiler()
    if compiler is None:
        raise BackendError("no C++ compiler (c++, g++ or clang++; or name one in CXX)")
    folder = cache_folder()
    doubt = _doubt(folder)
    if doubt is not None:
        raise BackendError(f"{doubt}; name another folder in OPENK3_CACHE")
    return compiler, folder, _key(compiler)


def cache_folder() -> Path:
    """Where libraries lie: OPENK3_CACHE, or openk3 in the user's cache folder."""
    own = os.environ.get("OPENK3_CACHE")
    home = os.environ.get("XDG_CACHE_HOME")
    base = Path(own) if own else Path(home or os.path.expanduser("~/.cache")) / "openk3"
    return base / "native"


def _doubt(folder: Path) -> str | None:
    """Why libraries in a folder might be somebody else's, or None; it need not be there yet."""
    if not folder.is_absolute():  # nor has a user a home whose name is still "~"
        return f"{folder} depends on where the program is started"
    try:
        folder = folder.resolve()
        if folder.exists() and not _own(folder.stat()):
            return f"{folder} is not this user's, or others may write to it"
        for parent in folder.parents:
            found = parent.stat() if parent.exists() else None
            if found and not _keeps(found):
                return f"others may replace what is in {parent}"
    except OSError as error:
        return f"{folder} cannot be looked at: {error}"
    return None


def _own(found: os.stat_result) -> bool:
    """Whether this user owns a file or folder, and nobody else may write to it."""
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _keeps(found: os.stat_result) -> bool:
    """Whether a folder's entries can be renamed by this user, its group and root only."""
    closed = not found.st_mode & stat.S_IWOTH or bool(found.st_mode & stat.S_ISVTX)
    return closed and found.st_uid in (os.getuid(), 0)


def _key(compiler: list[str]) -> str:
    said = version(tuple(compiler))
    if not said:
        raise BackendError(f"{shlex.join(compiler)} does not say its version")
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    for part in (*FLAGS, *OPENMP, *compiler, said, _processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


@functools.cache
def _processor() -> str:
    """What -march=native asks about: code for one processor may not run on another."""
    facts = platform.machine() + platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return facts
    wanted = ("flags", "Features", "model name", "CPU part")
    return facts + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def _cached(folder: Path, key: str) -> Path | None:
    """A library of that key whose bytes are as they were written, and are this user's."""
    for path in sorted(folder.glob(f"{key}-*.so")):
        with suppress(OSError):  # gone meanwhile, or not to be read: as if it were not there
            if _own(path.lstat()) and path.stem == f"{key}-{_digest(path)}":
                return path
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _build(compiler: list[str], folder: Path, key: str, level: int = logging.WARNING) -> Path:
    """level: a warning, where somebody waits: who does should know why, also in verbs that show no
    other log."""
    begin = time.monotonic()
    said = "compiling the CPU kernels with %s, once; they are kept in %s"
    log.log(level, said, compiler[0], folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(folder)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as aside:
            made = Path(aside) / "made.so"
            _compile(compiler, made)
            made.chmod(0o700)
            path = folder / f"{key}-{_digest(made)}.so"
            os.replace(made, path)
    except OSError as error:
        raise BackendError(
            f"cannot keep a compiled library in {folder}: {error}; name another in OPENK3_CACHE"
        ) from error
    log.info("compiled in %.1f s", time.monotonic() - begin)
    return path


def _sweep(folder: Path) -> None:
    """Remove what builds that were killed have left."""
    for left in folder.glob(".build-*"):
        with suppress(FileNotFoundError):  # another process sweeps too
            if left.stat().st_mtime < time.time() - ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)


def _load_error(path: Path) -> str | None:
    """Why a library cannot be loaded: some compilers accept OpenMP without having its library."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return f"error: {error}"
    return None


def _compile(compiler: list[str], target: Path) -> None:
    said = ""
    for threads in OPENMP:
        command = [*compiler, *FLAGS, threads, str(SOURCES / MAIN), "-o", str(target)]
        ran = run(command, COMPILE_S, TMPDIR=str(target.parent), LC_ALL="C")
        problem = ran.stderr if ran.returncode else _load_error(target)
        if problem is None:
            return
        if ran.returncode < 0:
            raise BackendError(f"{compiler[0]} was stopped by signal {-ran.returncode}")
        said = said or problem
    lines = said.strip().splitlines() or ["no message"]
    first = next((line for line in lines if "error" in line), lines[0])
    raise BackendError(f"{compiler[0]} does not compile the CPU kernels: {first}")
