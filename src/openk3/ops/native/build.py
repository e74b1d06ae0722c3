"""Builds the C++ of `source/` with the machine's compiler, once, and loads it.

A library lies in the cache folder under a name made of everything that went into it (sources,
flags, compiler, processor) and of a digest of its own bytes: a file that was cut short or changed
is not loaded but built again. It is written aside and renamed, so that processes that build at
once do not disturb each other. Nothing but a C++20 compiler is needed; without one the reference
in Python runs.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from openk3.errors import BackendError

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "source"
MAIN = "native.cpp"
FLAGS = (
    "-std=c++20 -O3 -march=native -fno-math-errno -fno-trapping-math -shared -fPIC -pthread"
).split()
OPENMP = ("-fopenmp", "-fopenmp-simd")
"""The second, one thread alone, for compilers that come without OpenMP's library."""
COMPILERS = ("c++", "g++", "clang++")
COMPILE_S = 300
_failure: list[str] = []
"""Why building failed in this process: it is not tried again."""


def available() -> tuple[bool, str]:
    """Whether the library is there or could be built, and why. Builds nothing."""
    if _failure:
        return False, _failure[0]
    compiler = find_compiler()
    if compiler is None:
        return False, "no C++ compiler (c++, g++ or clang++; or name one in CXX)"
    known = _cached(cache_folder(), _key(compiler))
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


def _load() -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        raise BackendError(available()[1])
    folder, key = cache_folder(), _key(compiler)
    path = _cached(folder, key)
    if path is None:
        path = _build(compiler, folder, key)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendError(f"{path} cannot be loaded: {error}") from error


def cache_folder() -> Path:
    """Where libraries lie: OPENK3_CACHE, or openk3 in the user's cache folder."""
    own = os.environ.get("OPENK3_CACHE")
    home = os.environ.get("XDG_CACHE_HOME")
    base = Path(own) if own else Path(home or os.path.expanduser("~/.cache")) / "openk3"
    return base / "native"


def find_compiler() -> list[str] | None:
    """The command of CXX, or the first compiler in PATH."""
    named = shlex.split(os.environ.get("CXX", ""))
    for name in [named] if named else [[name] for name in COMPILERS]:
        found = shutil.which(name[0])
        if found:
            return [found, *name[1:]]
    return None


def _key(compiler: list[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    for part in (*FLAGS, *OPENMP, *compiler, _version(tuple(compiler)), _processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    ran = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return ran.stdout


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
        mine = path.stat().st_uid == os.getuid()
        if mine and path.stem == f"{key}-{_digest(path)}":
            return path
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _build(compiler: list[str], folder: Path, key: str) -> Path:
    begin = time.monotonic()
    # a warning, since who waits should know why, in verbs that show no other log as well
    log.warning("compiling the CPU kernels with %s, once; they are kept in %s", compiler[0], folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as aside:
            made = Path(aside) / "made.so"
            _compile(compiler, made)
            path = folder / f"{key}-{_digest(made)}.so"
            os.replace(made, path)
    except OSError as error:
        raise BackendError(f"cannot keep a compiled library in {folder}: {error}") from error
    log.info("compiled in %.1f s", time.monotonic() - begin)
    return path


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
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=COMPILE_S
            )
        except subprocess.TimeoutExpired as error:
            raise BackendError(f"{compiler[0]} took longer than {COMPILE_S} s") from error
        problem = ran.stderr if ran.returncode else _load_error(target)
        if problem is None:
            return
        said = said or problem
    lines = said.strip().splitlines() or ["no message"]
    first = next((line for line in lines if "error" in line), lines[0])
    raise BackendError(f"{compiler[0]} does not compile the CPU kernels: {first}")
