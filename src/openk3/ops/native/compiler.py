"""The machine's C++ compiler: which it is, and running it so that nothing of it is left behind."""

import atexit
import functools
import os
import shlex
import shutil
import signal
import subprocess
import threading
from contextlib import suppress

from openk3.errors import BackendError

COMPILERS = ("c++", "g++", "clang++")
VERSION_S = 60
_groups: set[int] = set()
"""Process groups that are not to outlive this program."""
_starting = threading.Lock()
"""Held from before one starts until it is among them."""


def find_compiler() -> list[str] | None:
    """The command of CXX, or the first compiler in PATH."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quote that does not end
        return None
    for name in [named] if named else [[name] for name in COMPILERS]:
        found = shutil.which(name[0])
        if found:
            return [found, *name[1:]]
    return None


@functools.cache
def version(compiler: tuple[str, ...]) -> str:
    """What a compiler says of itself; nothing if it cannot run."""
    try:
        return run([*compiler, "--version"], VERSION_S).stdout
    except BackendError:
        return ""


def run(command: list[str], seconds: float, **more: str) -> subprocess.CompletedProcess[str]:
    """A command with `more` in its environment. Raises BackendError if it cannot be started or
    takes longer; nothing that it started then goes on, nor when this program ends."""
    try:
        with _starting:
            running = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, errors="replace", env=os.environ | more, start_new_session=True,
            )  # fmt: skip
            _groups.add(running.pid)
        with running:
            try:
                out, said = running.communicate(timeout=seconds)
            except BaseException:
                _stop(running.pid)
                raise
            finally:
                _groups.discard(running.pid)
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"{command[0]} took longer than {seconds:g} s") from error
    except OSError as error:
        raise BackendError(f"{command[0]} cannot be started: {error}") from error
    return subprocess.CompletedProcess(command, running.returncode, out, said)


@atexit.register
def _stop_all() -> None:
    with _starting:
        for group in list(_groups):
            _stop(group)


def _stop(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
