"""Merging overlay layers: whiteouts, opaque folders, hard links and ownership are kept."""

import ctypes
import os
import shutil
import stat
from pathlib import Path

OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")


def tree_bytes(path: Path) -> int:
    """Disk bytes of a folder."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in [".", *names]:
            total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def is_whiteout(info: os.stat_result) -> bool:
    """Overlay's mark for `deleted here`."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def is_opaque(path: Path) -> bool:
    """Whether a folder hides what lower layers have in it."""
    for name in OPAQUE:
        try:
            if os.getxattr(path, name, follow_symlinks=False) == b"y":
                return True
        except OSError:
            continue
    return False


def merge(layers: list[Path], target: Path, root: bool, base: list[Path] | None = None) -> None:
    """Write to the new folder `target` what `layers` (oldest first) mean together, durably.

    base: all that lies below them. Marks that hide nothing of it are left out, as they must be:
    overlayfs shows a whiteout in a folder that no lower layer has. None keeps every mark.
    """
    target.mkdir()
    merger = _Merger(root)
    merger.folder([layer for layer in layers if layer.is_dir()], target, base)
    sync_filesystem(target)


def sync_filesystem(path: Path) -> None:
    """syncfs(2): one call instead of one fsync for each of thousands of small files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(handle):
            raise OSError(ctypes.get_errno(), f"syncfs {path}")
    finally:
        os.close(handle)


class _Merger:
    def __init__(self, root: bool) -> None:
        self.opaque = OPAQUE[0 if root else 1]
        self.links: dict[tuple[int, int], Path] = {}

    def folder(self, sources: list[Path], target: Path, base: list[Path] | None) -> None:
        """`sources` are folders that lie over one another, the topmost last."""
        for name in sorted({name for source in sources for name in os.listdir(source)}):
            below = None if base is None else _below(base, name)
            stack = _visible(sources, name)
            if stat.S_ISDIR(os.lstat(stack[-1]).st_mode):
                self._subfolder(sources, stack, target / name, below)
            elif below != [] or not is_whiteout(os.lstat(stack[0])):
                _copy_leaf(stack[0], target / name, self.links)
        _copy_metadata(sources[-1], target)

    def _subfolder(
        self, sources: list[Path], stack: list[Path], target: Path, below: list[Path] | None
    ) -> None:
        target.mkdir()
        hides = _hides_below(sources, target.name)
        self.folder(stack, target, [] if hides else below)
        if hides and below != []:
            os.setxattr(target, self.opaque, b"y")


def _below(base: list[Path], name: str) -> list[Path]:
    return [place / name for place in base if os.path.lexists(place / name)]


def _visible(sources: list[Path], name: str) -> list[Path]:
    """The folders that make up one entry, oldest first; or the one thing that is no folder."""
    stack: list[Path] = []
    for source in reversed(sources):
        place = source / name
        if not os.path.lexists(place):
            continue
        if not stat.S_ISDIR(os.lstat(place).st_mode):
            return stack or [place]
        stack.insert(0, place)
        if is_opaque(place):
            break
    return stack


def _hides_below(sources: list[Path], name: str) -> bool:
    """A merged folder is opaque when any of its layers was, or replaced a non-folder."""
    for source in sources:
        place = source / name
        if os.path.lexists(place) and (
            not place.is_dir() or place.is_symlink() or is_opaque(place)
        ):
            return True
    return False


def _copy_leaf(source: Path, target: Path, links: dict[tuple[int, int], Path]) -> None:
    info = os.lstat(source)
    if info.st_nlink > 1 and (info.st_dev, info.st_ino) in links:
        os.link(links[info.st_dev, info.st_ino], target, follow_symlinks=False)
        return
    if stat.S_ISREG(info.st_mode):
        with open(source, "rb") as src, open(target, "xb") as out:
            shutil.copyfileobj(src, out, 1 << 20)
    elif stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(source), target)
    else:
        os.mknod(target, info.st_mode, info.st_rdev)
    if not is_whiteout(info):
        _copy_metadata(source, target)
    if info.st_nlink > 1:
        links[info.st_dev, info.st_ino] = target


def _copy_metadata(source: Path, target: Path) -> None:
    info = os.lstat(source)
    if os.geteuid() == 0:
        os.chown(target, info.st_uid, info.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        os.chmod(target, stat.S_IMODE(info.st_mode))
    for name in os.listxattr(source, follow_symlinks=False):
        if name.startswith(("user.", "security.")) and ".overlay." not in name:
            os.setxattr(
                target,
                name,
                os.getxattr(source, name, follow_symlinks=False),
                follow_symlinks=False,
            )
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)
