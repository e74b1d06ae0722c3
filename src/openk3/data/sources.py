"""Documents from text files, JSONL files and folders of source files.

A source can be iterated more than once and yields `Document`s in the same order each time; what it
leaves out is counted in `skipped`, never silent.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from openk3.errors import ConfigError, DataError, nearest

_JSON_LINES = (".jsonl", ".ndjson")


class Document(NamedTuple):
    """A name that decides the split, and text as UTF-8 bytes."""

    name: str
    text: bytes


class Source(Protocol):
    """Re-iterable documents. `skipped` counts, by reason, what the latest iteration left out."""

    skipped: Counter[str]

    def __iter__(self) -> Iterator[Document]: ...


def is_text(raw: bytes) -> bool:
    """Whether `raw` is UTF-8 without zero bytes; anything else is taken for a binary file."""
    if b"\0" in raw:
        return False
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def cut(document: Document, max_bytes: int) -> Iterator[Document]:
    """Pieces of at most `max_bytes`, named name#0, name#1, ..., cut after a line where possible."""
    name, text = document
    if len(text) <= max_bytes:
        yield document
        return
    start = number = 0
    while start < len(text):
        end = min(start + max_bytes, len(text))
        if end < len(text):
            end = text.rfind(b"\n", start, end) + 1 or _character_border(text, end)
        yield Document(f"{name}#{number}", text[start:end])
        start, number = end, number + 1


def _character_border(text: bytes, end: int) -> int:
    while text[end] & 0xC0 == 0x80:  # inside a UTF-8 sequence
        end -= 1
    return end


@dataclass(frozen=True)
class _Entry:
    name: str
    path: Path


class Files:
    """The documents of files and folders.

    A file is one document, a .jsonl file one document per line (the string in `field`), a folder
    all its files in sorted order, except hidden ones and Python caches. Documents over `max_bytes`
    are cut. Binary and empty files are skipped and counted.

    Raises DataError for a path that does not exist or cannot be read, and for a bad JSONL line.
    """

    def __init__(
        self, paths: Sequence[str | Path], *, field: str = "text", max_bytes: int = 1 << 20
    ) -> None:
        if max_bytes < 16:
            raise ConfigError(f"documents cannot be cut to {max_bytes} bytes; the least is 16")
        self.paths = [Path(path) for path in paths]
        self.field, self.max_bytes = field, max_bytes
        self.skipped: Counter[str] = Counter()
        missing = [str(path) for path in self.paths if not path.exists()]
        if missing or not self.paths:
            raise DataError(f"no such file or folder: {', '.join(missing) or 'none was given'}")

    def __iter__(self) -> Iterator[Document]:
        self.skipped.clear()
        for entry in _walk(self.paths):
            for document in self._read(entry):
                if not document.text.strip():
                    self.skipped["empty"] += 1
                else:
                    yield from cut(document, self.max_bytes)

    def _read(self, entry: _Entry) -> Iterator[Document]:
        if entry.path.suffix in _JSON_LINES:
            yield from _read_json_lines(entry, self.field)
            return
        try:
            raw = entry.path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {entry.path}: {error.strerror}") from error
        if is_text(raw):
            yield Document(entry.name, raw)
        else:
            self.skipped["binary"] += 1


def _walk(paths: Iterable[Path]) -> Iterator[_Entry]:
    for root in paths:
        if not root.is_dir():
            yield _Entry(root.name, root)
            continue
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(n for n in subfolders if n[0] != "." and n != "__pycache__")
            for name in sorted(names):
                path = Path(folder) / name
                if name[0] != "." and path.is_file():
                    yield _Entry((root.resolve().name / path.relative_to(root)).as_posix(), path)


def _read_json_lines(entry: _Entry, field: str) -> Iterator[Document]:
    try:
        with open(entry.path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{entry.path}, line {number}"
                    yield Document(f"{entry.name}:{number}", _json_text(line, field, where))
    except OSError as error:
        raise DataError(f"cannot read {entry.path}: {error.strerror}") from error


def _json_text(line: bytes, field: str, where: str) -> bytes:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(record, dict) or field not in record:
        keys = sorted(record) if isinstance(record, dict) else []
        raise DataError(f"{where}: no field {field!r}{nearest(field, keys)}; it has {keys}")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} is {type(text).__name__}, a string is needed")
    return text.encode("utf-8", "replace")  # JSON can spell lone surrogates, UTF-8 cannot
