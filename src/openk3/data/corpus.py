"""The quickstart corpus: Python sources with documentation strings that are on every machine here.

The text comes from the standard library and from packages that this project depends on, so nothing
is downloaded and nothing is committed. The choice depends only on the installed files: packages in
a fixed order, each one's files in an order of hashed names, until the wanted size is reached.

To be learnable by a very small model the text is homogeneous: plain ASCII, documented, no tests, no
vendored copies, no generated code, no tables of data.
"""

import hashlib
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from openk3.data.sources import Document
from openk3.errors import ConfigError, DataError

STDLIB = "python"
# after the standard library, the documented dependencies: those of torch come with it
PACKAGES = (STDLIB, "numpy", "networkx", "torch", "sympy", "matplotlib")

_LEFT_OUT = frozenset(
    "test tests testing idle_test site-packages dist-packages __pycache__ encodings pydoc_data "
    "_vendor vendor third_party extern _internal".split()
)
_MIN_BYTES, _MAX_BYTES = 1500, 150_000
_MAX_LINE = 160
_GENERATED = re.compile(
    rb"(?i)generated (by|from|with|using)|do not edit|auto(matically)?-?generated"
)
_TABLE_BYTES = b"0123456789,"


def is_readable_source(text: bytes) -> bool:
    """Whether a Python file is documented, hand-written, ASCII code rather than data or a test."""
    if not _MIN_BYTES <= len(text) <= _MAX_BYTES or not text.isascii() or b"\0" in text:
        return False
    if b'"""' not in text or b"def " not in text:
        return False
    if _GENERATED.search(text, 0, 1500) or max(map(len, text.split(b"\n"))) > _MAX_LINE:
        return False
    if sum(map(text.count, _TABLE_BYTES)) > 0.12 * len(text):
        return False
    # tables and boilerplate shrink to less than a seventh
    return 7 * len(zlib.compress(text, 6)) > len(text)


class LocalCorpus:
    """Re-iterable documents of about `num_bytes` bytes, the same ones on every run of a machine.

    Raises DataError if nothing suitable is installed. When less than `num_bytes` is found the
    corpus is smaller; `packages` counts the bytes by package after an iteration.
    """

    def __init__(self, num_bytes: int = 8_000_000, packages: tuple[str, ...] = PACKAGES) -> None:
        if num_bytes < 1:
            raise ConfigError(f"the corpus size is {num_bytes} bytes; it must be positive")
        self.num_bytes = num_bytes
        self.roots = {name: root for name in packages if (root := _root(name)) is not None}
        if not self.roots:
            raise DataError(f"none of {', '.join(packages)} is installed as Python sources")
        self.skipped: Counter[str] = Counter()
        self.packages: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Document]:
        self.skipped.clear()
        self.packages.clear()
        seen: set[bytes] = set()
        for package, root in self.roots.items():
            for name in _hashed_order(package, root):
                if self.packages.total() >= self.num_bytes:
                    return
                text = (root / name).read_bytes()
                digest = hashlib.blake2b(text, digest_size=16).digest()
                if not is_readable_source(text) or digest in seen:
                    self.skipped["unsuitable"] += 1
                    continue
                seen.add(digest)
                self.packages[package] += len(text)
                yield Document(f"{package}/{name}", text)


def _root(package: str) -> Path | None:
    if package == STDLIB:
        return Path(sysconfig.get_paths()["stdlib"])
    spec = find_spec(package)  # does not import the package
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def _hashed_order(package: str, root: Path) -> list[str]:
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        paths = (Path(folder, name) for name in files if name.endswith(".py"))
        names += [p.relative_to(root).as_posix() for p in paths if not p.name.startswith("test_")]
    return sorted(names, key=lambda n: hashlib.blake2b(f"{package}/{n}".encode()).digest())
