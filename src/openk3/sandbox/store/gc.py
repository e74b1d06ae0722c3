"""Sweeping: what no record names is rubbish. Runs only while nobody else uses the store."""

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from openk3.errors import NotFoundError, StorageError
from openk3.sandbox.store import pages
from openk3.sandbox.store.home import Home, is_owned, remove_tree
from openk3.sandbox.store.records import BoxRecord, ImageManifest, SnapshotRecord

GRACE_S = 60.0  # age below which an unowned, recordless box may still be starting


def referenced_images(home: Home) -> set[str]:
    """Images that a box or a snapshot names, or that warm a template."""
    found: set[str] = set()
    for folder in home.boxes.iterdir():
        try:
            record = BoxRecord.load(folder / "box.json")
        except NotFoundError:
            found |= _started_from(folder)
            continue
        found |= {name for name in (record.image, record.previous) if name}
    for file in home.snapshots.glob("*.json"):
        found.add(SnapshotRecord.load(file).image)
    for link in home.templates.glob("*.warm"):
        found.add(link.read_text().strip())
    return found


def _started_from(folder: Path) -> set[str]:
    """The image of a machine that nobody has adopted yet."""
    file = folder / "from"
    return set(file.read_text().split()) if file.exists() else set()


def collect(home: Home) -> int:
    """Delete unreferenced images, layers and pages; how many things went. 0 when busy.

    The store is held only while things are renamed away: deleting may take the disk seconds.
    """
    gone: list[Path] = []

    def away(place: Path) -> None:
        target = home.tmp / f"gone-{secrets.token_hex(6)}"
        os.rename(place, target)
        gone.append(target)

    with home.sweeping() as alone:
        if alone:
            _put_away(home, away)
    for place in gone:
        remove_tree(place, home.path)
    return len(gone) + (_sweep_tmp(home) if alone else 0)


def _put_away(home: Home, away: Callable[[Path], None]) -> None:
    try:
        keep = referenced_images(home)
    except StorageError:
        return  # what a damaged record needs is unknown: keep everything
    layers: set[str] = set()
    packed: set[str] = set()
    for folder in list(home.images.iterdir()):
        if folder.name not in keep:
            away(folder)
            continue
        try:
            manifest = ImageManifest.load(folder / "manifest.json")
        except (NotFoundError, StorageError):
            return  # which layers a damaged image needs is unknown: keep them all
        layers |= set(manifest.layers)
        if manifest.packed:
            packed.add(folder.name)
            for place in (folder / name for name in manifest.files):
                if place.exists():
                    away(place)
    for place in list(home.layers.iterdir()):
        if place.name not in layers:
            away(place)
    pages.sweep(home.pages, packed, away)


def _sweep_tmp(home: Home) -> int:
    """Things half deleted or half made by processes that died."""
    gone = 0
    for place in list(home.tmp.iterdir()):
        if _age(place) > GRACE_S:
            remove_tree(place, home.path)
            gone += 1
    return gone


def abandoned_boxes(home: Home) -> list[Path]:
    """Box folders without a record and without an owner: creations that died."""
    return [
        folder
        for folder in home.boxes.iterdir()
        if not (folder / "box.json").exists() and not is_owned(folder) and _age(folder) > 2.0
    ]


def _age(path: Path) -> float:
    try:
        return time.time() - os.lstat(path).st_mtime
    except FileNotFoundError:
        return 0.0
