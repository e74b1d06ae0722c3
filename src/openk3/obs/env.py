"""What a run ran on and with which code: the facts that env.json and code.diff keep."""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from openk3._version import __version__

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "triton", "tiktoken", "pillow", "ray")
"""Packages whose versions change numbers or speed."""


def describe() -> dict[str, Any]:
    """Versions, machine and command line. Imports none of the packages it names."""
    return {
        "openk3": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_count": usable_cpus(),
        "memory_bytes": total_memory(),
        "packages": {name: v for name in PACKAGES if (v := version(name)) is not None},
        "argv": sys.argv,
        "time": time.time(),
        "commit": commit(),
    }


def version(package: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def usable_cpus() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's model name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def total_memory() -> int | None:
    """Bytes of memory of this machine, or None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def peak_memory() -> int | None:
    """Largest resident set of this process so far, in bytes, or None."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def commit() -> str | None:
    """The commit of the checkout this package is imported from, or None when it is in none."""
    return _git("rev-parse", "HEAD") if _tracked() else None


def code_diff() -> str | None:
    """Its uncommitted changes to tracked files, as a patch; None outside a checkout."""
    return _git("diff", "HEAD") if _tracked() else None


def _tracked() -> bool:
    # A virtual environment may lie inside somebody else's checkout: only our own files count.
    return _git("ls-files", "--error-unmatch", "_version.py") is not None


def _git(*argv: str) -> str | None:
    here = Path(__file__).resolve().parents[1]
    command = ["git", "-c", "core.quotepath=off", "-C", str(here), *argv]
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace").rstrip("\n") if done.returncode == 0 else None
