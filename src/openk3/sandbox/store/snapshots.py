"""Snapshots: named, immutable owners of an image, whose memory goes to the page store."""

import time

from openk3.errors import NotFoundError
from openk3.sandbox.store import gc, pages
from openk3.sandbox.store.home import Home, new_id
from openk3.sandbox.store.records import BoxRecord, ImageManifest, SnapshotRecord


def save(home: Home, box: BoxRecord, name: str | None, memory: bool) -> SnapshotRecord:
    """Make the image of a sandbox a snapshot. The caller is `using` the home."""
    assert box.image, "a snapshot of a sandbox that has no image"
    saved = SnapshotRecord(
        id=new_id("snap"),
        name=name,
        image=box.image,
        sandbox_id=box.id,
        backend=box.backend,
        template=box.template,
        limits=box.limits,
        env=box.env,
        user=box.user,
        created=time.time(),
        memory=memory,
    )
    saved.save(SnapshotRecord.path(home, saved.id))
    _pack(home, box.image)
    return saved


def _pack(home: Home, image: str) -> None:
    """Move a memory image into the page store, where equal pages are kept once."""
    path = ImageManifest.path(home, image)
    manifest = ImageManifest.load(path)
    if manifest.packed or not manifest.files:
        return
    pages.pack(home.pages, image, [path.parent / file for file in manifest.files])
    manifest.packed = True
    manifest.save(path)  # the plain files go when nobody can be reading them: in gc.collect


def every(home: Home) -> list[SnapshotRecord]:
    """All snapshots, oldest first."""
    found = [SnapshotRecord.load(file) for file in home.snapshots.glob("*.json")]
    return sorted(found, key=lambda saved: saved.created)


def find(home: Home, name: str) -> SnapshotRecord:
    """By id, or the newest of a name. Raises NotFoundError."""
    for saved in reversed(every(home)):
        if name in (saved.id, saved.name):
            return saved
    raise NotFoundError(f"no snapshot {name!r}")


def delete(home: Home, name: str) -> None:
    """Sandboxes made from it are unaffected. Raises NotFoundError."""
    SnapshotRecord.path(home, find(home, name).id).unlink(missing_ok=True)
    gc.collect(home)
