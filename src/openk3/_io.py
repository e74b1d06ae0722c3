"""Atomic files, strict JSON, clocks and seeds: the few habits every folder shares."""

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from openk3.errors import OpenK3Error, StorageError


class Clock(Protocol):
    """Time as an argument, so that schedulers can be tested without sleeping."""

    def now(self) -> float:
        """Seconds from an arbitrary, monotonic origin."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


def fsync_dir(path: Path) -> None:
    """Make a rename inside `path` durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_file(path: str | Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Write beside `path`, fsync, rename over it. A failure leaves the old file as it was.

    Raises StorageError when the disk refuses the bytes.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, mode, encoding=None if "b" in mode else "utf-8") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(aside, path)
        fsync_dir(path.parent)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def atomic_dir(path: str | Path) -> Iterator[Path]:
    """Fill a folder beside `path`, fsync it, rename it into place. `path` must not exist yet.

    Raises StorageError when the disk refuses the bytes; then nothing is left behind.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        yield aside
        fsync_tree(aside)
        os.rename(aside, path)
        fsync_dir(path.parent)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def fsync_tree(path: Path) -> None:
    """Make every file below `path` durable."""
    for folder, _, names in os.walk(path):
        for name in names:
            _fsync_file(Path(folder) / name)
        fsync_dir(Path(folder))


def _fsync_file(path: Path) -> None:
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())


def write_json(path: str | Path, value: Any) -> None:
    """Atomically write `value` as indented JSON with sorted keys."""
    with atomic_file(path, "w") as handle:
        json.dump(value, handle, indent=2, sort_keys=True, ensure_ascii=False)
        handle.write("\n")


def read_json(path: str | Path, error: type[OpenK3Error], *, kind: type = dict) -> Any:
    """The JSON object (or other `kind`) in a file.

    Raises `error` naming the file when it cannot be read or is not that, strictly.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}") from problem
    return parse_json(data, str(path), error, kind=kind)


def parse_json(
    data: bytes | str, where: str, error: type[OpenK3Error], *, kind: type = dict
) -> Any:
    """JSON text as Python values; `error` about `where` for bad JSON, a key given twice, nesting
    too deep to read, or another kind of value than `kind`."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise error(f"{where} lists {twice!r} twice")
        return table

    try:
        value = json.loads(data, object_pairs_hook=no_duplicates)
    except OpenK3Error:
        raise
    except RecursionError:
        raise error(f"{where} is not JSON that can be read: it is nested too deeply") from None
    except ValueError as problem:
        raise error(f"{where} is not JSON ({problem})") from problem
    if not isinstance(value, kind):
        wanted = {dict: "object", list: "list"}[kind]
        raise error(f"{where} is not a JSON {wanted} but a {type(value).__name__}")
    return value


def sha256_file(path: str | Path, progress: Callable[[int], None] | None = None) -> str:
    """Hex digest of a file, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while piece := handle.read(1 << 20):
            digest.update(piece)
            if progress:
                progress(len(piece))
    return digest.hexdigest()


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed that is a pure function of `seed` and a path of names."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def require_disk(folder: str | Path, num_bytes: int, purpose: str) -> None:
    """Raise StorageError unless the disk that holds `folder` has `num_bytes` free."""
    folder = Path(folder)
    probe = folder
    while not probe.exists():
        probe = probe.parent
    free = shutil.disk_usage(probe).free
    if free < num_bytes:
        raise StorageError(
            f"{purpose} needs about {num_bytes / 2**30:.2f} GiB but the disk of {folder} has "
            f"{free / 2**30:.2f} GiB free; free some space or choose another folder"
        )
