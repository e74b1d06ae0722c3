"""`metrics.jsonl`: append-only, one JSON object a line, whole after a kill at any moment.

Line 1 is a header with the schema version. A resumed run appends a `resume` row that names the step
it continued from: rows above it with a larger step stay in the file and are superseded, and readers
here leave them out. Nothing that was written is rewritten; only a torn last line is cut off.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from openk3.errors import DataError, InputError, StorageError
from openk3.obs.rows import SCHEMA, Row, json_ready


class Sink(Protocol):
    """Somewhere else that rows go, as they are written."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Take one row."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class MetricsWriter:
    """The one writer of a run's `metrics.jsonl`. A second one is refused while it lives.

    Each row is one write of one line. Raises StorageError, leaving whole lines only, when the disk
    refuses it.
    """

    def __init__(self, path: str | Path, sinks: Iterable[Sink] = ()) -> None:
        self.path = Path(path)
        self.sinks = list(sinks)
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise StorageError(f"cannot open {path}: {error.strerror}") from error
        _lock(self._file, self.path)
        self.torn_bytes = _cut_torn_line(self._file)
        """Bytes of an unfinished last line that were cut off when the file was opened."""
        if os.lseek(self._file, 0, os.SEEK_END) == 0:
            self._append({"kind": "header", "schema": SCHEMA, "time": time.time()})

    def write(self, row: Row | Mapping[str, Any]) -> None:
        """Append one row. A mapping needs at least `kind` and an integer `step`."""
        record = row.to_dict() if isinstance(row, Row) else json_ready(row)
        if not isinstance(record.get("kind"), str) or not isinstance(record.get("step"), int):
            raise InputError(f"a metrics row needs a kind and an integer step, not {record!r}")
        self._append(record)
        for sink in self.sinks:
            sink.log(record)

    def mark_resume(self, step: int, attempt: int) -> None:
        """Say that the run goes on from `step`; rows with a larger one are superseded."""
        record = {"kind": "resume", "step": step, "attempt": attempt, "time": time.time()}
        self._append(record | ({"torn_bytes": self.torn_bytes} if self.torn_bytes else {}))

    def sync(self) -> None:
        """Return when every row is on the disk, not only with the operating system."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file and every sink. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            for sink in self.sinks:
                sink.close()

    def _append(self, record: Mapping[str, Any]) -> None:
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
        end = os.lseek(self._file, 0, os.SEEK_END)
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror}") from error
        if written != len(line):
            os.ftruncate(self._file, end)
            raise StorageError(f"cannot write {self.path}: the disk is full; free some space")


def _lock(file: int, path: Path) -> None:
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise StorageError(
            f"another process is writing {path}; wait for it or choose another run folder"
        ) from None


def _cut_torn_line(file: int) -> int:
    """End the file at its last whole line; return how many bytes were cut."""
    size = os.lseek(file, 0, os.SEEK_END)
    start, tail = size, b""
    while start > 0 and b"\n" not in tail:
        step = min(1 << 16, start)
        start -= step
        tail = os.pread(file, step, start) + tail
    torn = tail[tail.rfind(b"\n") + 1 :]
    if not torn:
        return 0
    if _parse(torn) is not None:
        os.write(file, b"\n")
        return 0
    os.ftruncate(file, size - len(torn))
    return len(torn)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_rows(path: str | Path, *, superseded: bool = False) -> list[dict[str, Any]]:
    """The rows of a metrics file, header and resume rows included, in order.

    Rows that a resume has superseded are left out unless asked for, and so is a torn last line
    (the file of a live run may end in one). Raises DataError naming any other bad line.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        row = _parse(line)
        if row is None:
            if number < len(lines):
                raise DataError(f"{path} line {number} is not a JSON object; mend or delete it")
            continue
        if number == 1:
            _check_header(row, path)
        if row.get("kind") == "resume" and not superseded:
            rows = [old for old in rows if old.get("step", 0) <= row["step"]]
        rows.append(row)
    return rows


def _check_header(row: dict[str, Any], path: Path) -> None:
    schema = row.get("schema")
    if row.get("kind") != "header" or not isinstance(schema, int):
        raise DataError(f"{path} is no metrics file: its first line is not a header with a schema")
    if schema > SCHEMA:
        raise DataError(
            f"{path} has schema {schema}; this version reads up to {SCHEMA}: upgrade openk3"
        )
