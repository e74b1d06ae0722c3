"""Python modules in one uncompressed zip, compiled: few file system calls to start, few files to
make and delete. Host paths do not appear in the code."""

import importlib.util
import marshal
import os
import struct
import zipfile
from pathlib import Path
from types import CodeType

UNCHECKED_HASH = 1  # flags of a .pyc that is taken as it is
DATE = (2020, 1, 1, 0, 0, 0)


def add_module(archive: zipfile.ZipFile, source: Path, inner: str, with_source: bool) -> None:
    """Add `source` under the path `inner` (ending in .py) as .pyc, optionally beside its text."""
    text = source.read_bytes()
    try:
        code = _cached_code(source) or compile(text, inner, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return  # test data of the standard library that is no Python on purpose
    header = importlib.util.MAGIC_NUMBER + struct.pack("<I", UNCHECKED_HASH)
    body = header + importlib.util.source_hash(text) + marshal.dumps(_renamed(code, inner))
    archive.writestr(zipfile.ZipInfo(inner + "c", DATE), body)
    if with_source:
        archive.writestr(zipfile.ZipInfo(inner, DATE), text)


def add_tree(archive: zipfile.ZipFile, root: Path, skip: frozenset[str]) -> None:
    """Add every module below `root`, leaving out names in `skip`."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in skip and name != "__pycache__")
        for file in sorted(files):
            place = Path(folder) / file
            inner = place.relative_to(root).as_posix()
            if file.endswith(".py"):
                add_module(archive, place, inner, with_source=True)
            elif not file.endswith((".so", ".pyc", ".a", ".o")):
                archive.writestr(zipfile.ZipInfo(inner, DATE), place.read_bytes())


def _cached_code(source: Path) -> CodeType | None:
    """The interpreter's own compilation of the file, when it is up to date."""
    cached = Path(importlib.util.cache_from_source(str(source)))
    if not cached.exists():
        return None
    raw, info = cached.read_bytes(), source.stat()
    flags, mtime, size = struct.unpack_from("<III", raw, 4)
    fresh = (flags, mtime, size) == (0, int(info.st_mtime), info.st_size & 0xFFFFFFFF)
    return marshal.loads(raw[16:]) if raw[:4] == importlib.util.MAGIC_NUMBER and fresh else None


def _renamed(code: CodeType, name: str) -> CodeType:
    inner = tuple(_renamed(c, name) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=name, co_consts=inner)
