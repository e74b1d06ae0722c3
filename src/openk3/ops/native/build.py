"""Builds the C++ of `source/` with the machine's compiler, once, and loads it.

It is kept (`folder`) under a key of everything that went into it: sources, flags, compiler,
processor. Nothing but a C++20 compiler is needed; without one the reference in Python runs.
"""

import ctypes
import functools
import hashlib
import logging
import platform
import shlex
import threading
import time
from pathlib import Path

from openk3.errors import BackendError
from openk3.ops.native.compiler import find_compiler, run, version
from openk3.ops.native.folder import aside, cache_folder, doubt_about, find, keep

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "source"
MAIN = "native.cpp"
FLAGS = (
    "-std=c++20 -O3 -march=native -fno-math-errno -fno-trapping-math -shared -fPIC -pthread"
).split()
OPENMP = ("-fopenmp", "-fopenmp-simd")
"""The second, one thread alone, for compilers that come without OpenMP's library."""
COMPILE_S = 300
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
    known = find(folder, key)
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
    if _failure or find(folder, key):
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
    path = find(folder, key) or _build(compiler, folder, key)
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
    doubt = doubt_about(folder)
    if doubt is not None:
        raise BackendError(f"{doubt}; name another folder in OPENK3_CACHE")
    return compiler, folder, _key(compiler)


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


def _build(compiler: list[str], folder: Path, key: str, level: int = logging.WARNING) -> Path:
    """level: a warning, where somebody waits: who does should know why, also in verbs that show no
    other log."""
    begin = time.monotonic()
    said = "compiling the CPU kernels with %s, once; they are kept in %s"
    log.log(level, said, compiler[0], folder)
    with aside(folder) as room:
        made = room / "made.so"
        _compile(compiler, made)
        path = keep(made, folder, key)
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
