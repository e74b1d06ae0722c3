"""The folder of compiled libraries: where it lies, whether it is to be trusted, what it holds.

A library's name is the key of everything that went into it and a digest of its own bytes: a file
that was cut short or changed is not found. What is found is run, so only a folder that nobody but
this user can put files into is used. Files are written aside and renamed, so that processes that
build at once do not disturb each other.
"""

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from openk3.errors import BackendError

ABANDONED_S = 3600
"""Age of files of a build that was killed."""


def cache_folder() -> Path:
    """Where libraries lie: OPENK3_CACHE, or openk3 in the user's cache folder."""
    own = os.environ.get("OPENK3_CACHE")
    home = os.environ.get("XDG_CACHE_HOME")
    base = Path(own) if own else Path(home or os.path.expanduser("~/.cache")) / "openk3"
    return base / "native"


def doubt_about(folder: Path) -> str | None:
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


def find(folder: Path, key: str) -> Path | None:
    """A library of that key whose bytes are as they were written, and are this user's."""
    for path in sorted(folder.glob(f"{key}-*.so")):
        with suppress(OSError):  # gone meanwhile, or not to be read: as if it were not there
            if _own(path.lstat()) and path.stem == f"{key}-{_digest(path)}":
                return path
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


@contextmanager
def aside(folder: Path) -> Iterator[Path]:
    """A folder within, for one build; it is gone afterwards. Raises BackendError for files that
    cannot be written there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(folder)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as made:
            yield Path(made)
    except OSError as error:
        raise BackendError(
            f"cannot keep a compiled library in {folder}: {error}; name another in OPENK3_CACHE"
        ) from error


def keep(made: Path, folder: Path, key: str) -> Path:
    """Where a library lies from now on."""
    made.chmod(0o700)
    path = folder / f"{key}-{_digest(made)}.so"
    os.replace(made, path)
    return path


def _sweep(folder: Path) -> None:
    """Remove what builds that were killed have left."""
    for left in folder.glob(".build-*"):
        with suppress(FileNotFoundError):  # another process sweeps too
            if left.stat().st_mtime < time.time() - ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
