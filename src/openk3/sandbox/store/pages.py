"""Memory images of snapshots, each 4 KiB page stored once.

A pack is an append-once file of new pages with an index of their digests beside it. A recipe lists,
for each file of an image, runs of pages in packs. Two snapshots of one sandbox share nearly all of
their pages, wherever in the image these moved to.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from openk3._io import atomic_file, write_json
from openk3.errors import CheckpointError
from openk3.sandbox.store.home import new_id

PAGE = 4096
DIGEST = 16


def _load_index(store: Path) -> dict[bytes, tuple[str, int]]:
    index: dict[bytes, tuple[str, int]] = {}
    for file in store.glob("*.idx"):
        raw = file.read_bytes()
        for number in range(len(raw) // DIGEST):
            index[raw[number * DIGEST : (number + 1) * DIGEST]] = (file.stem, number)
    return index


def pack(store: Path, image_id: str, files: list[Path]) -> int:
    """Store the files of an image; bytes added to the disk for page content."""
    index = _load_index(store)
    name = new_id("p")
    fresh: list[bytes] = []
    recipe: dict[str, Any] = {}
    with atomic_file(store / f"{name}.pack") as out:
        for file in files:
            runs: list[list[Any]] = []
            for digest, page in _pages(file):
                if digest not in index:
                    out.write(page.ljust(PAGE, b"\0"))
                    index[digest] = (name, len(fresh))
                    fresh.append(digest)
                _extend(runs, *index[digest])
            recipe[file.name] = {"size": file.stat().st_size, "runs": runs}
    if fresh:
        with atomic_file(store / f"{name}.idx") as out:
            out.write(b"".join(fresh))
    else:
        (store / f"{name}.pack").unlink()
    write_json(store / f"{image_id}.recipe", recipe)
    return len(fresh) * PAGE


def _pages(file: Path) -> Iterator[tuple[bytes, bytes]]:
    with open(file, "rb") as source:
        while block := source.read(1 << 20):
            for at in range(0, len(block), PAGE):
                page = block[at : at + PAGE]
                yield hashlib.blake2b(page, digest_size=DIGEST).digest(), page


def _extend(runs: list[list[Any]], where: str, at: int) -> None:
    if runs and runs[-1][0] == where and runs[-1][1] + runs[-1][2] == at:
        runs[-1][2] += 1
    else:
        runs.append([where, at, 1])


def unpack(store: Path, image_id: str, target: Path) -> None:
    """Write the files of an image into folder `target`. Raises CheckpointError when incomplete."""
    try:
        recipe = json.loads((store / f"{image_id}.recipe").read_text())
        for name, entry in recipe.items():
            with open(target / name, "wb") as out:
                for where, at, count in entry["runs"]:
                    with open(store / f"{where}.pack", "rb") as source:
                        left, offset = count * PAGE, at * PAGE
                        while left:
                            sent = os.sendfile(out.fileno(), source.fileno(), offset, left)
                            if not sent:
                                raise CheckpointError(f"page pack {where} is cut short")
                            left, offset = left - sent, offset + sent
                out.truncate(entry["size"])
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise CheckpointError(f"the pages of image {image_id} are incomplete: {error}") from error


def sweep(store: Path, keep: set[str], away: Callable[[Path], None] = os.unlink) -> None:
    """Drop recipes of images not in `keep`, then packs that no recipe uses, through `away`."""
    used: set[str] = set()
    for file in list(store.glob("*.recipe")):
        if file.stem not in keep:
            away(file)
            continue
        for entry in json.loads(file.read_text()).values():
            used |= {run[0] for run in entry["runs"]}
    for file in [*store.glob("*.pack"), *store.glob("*.idx")]:
        if file.stem not in used:
            away(file)
