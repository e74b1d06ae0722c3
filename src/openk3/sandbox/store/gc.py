"""Sweeping: what no record names is rubbish. Runs only while nobody else uses the store."""

import os
import time
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
            continue
        found |= {name for name in (record.image, record.previous) if name}
    for file in home.snapshots.glob("*.json"):
        found.add(SnapshotRecord.load(file).image)
    for link in home.templates.glob("*.warm"):
        found.add(link.read_text().strip())
    return found


def collect(home: Home) -> int:
    """Delete unreferenced images, layers and pages; how many things went. 0 when busy."""
    with home.sweeping() as alone:
        if not alone:
            return 0
        try:
            keep = referenced_images(home)
        except StorageError:
            return 0  # what a damaged record needs is unknown: keep everything
        gone = 0
        layers: set[str] = set()
        packed: set[str] = set()
        for folder in list(home.images.iterdir()):
            if folder.name not in keep:
                remove_tree(folder, home.path)
                gone += 1
                continue
            try:
                manifest = ImageManifest.load(folder / "manifest.json")
            except (NotFoundError, StorageError):
                return gone  # which layers a damaged image needs is unknown: keep them all
            layers |= set(manifest.layers)
            if manifest.packed:
                packed.add(folder.name)
                for name in manifest.files:
                    (folder / name).unlink(missing_ok=True)
        for place in list(home.layers.iterdir()):
            if place.name not in layers:
                remove_tree(place, home.path)
                gone += 1
        gone += pages.sweep(home.pages, packed)
        return gone + _sweep_tmp(home)


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
