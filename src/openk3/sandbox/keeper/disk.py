"""The root file system of a live sandbox: template, sealed layers, and one size-capped upper.

As root the upper is an ext4 image on a loop device; for ordinary users, whose kernel offers them no
such mount, it is a tmpfs. Both answer ENOSPC at the cap. All mounts are private to the keeper.
"""

import os
import subprocess
from pathlib import Path

from openk3.sandbox.keeper import namespaces as ns
from openk3.sandbox.store.home import Home, new_id, remove_tree
from openk3.sandbox.store.layers import merge, tree_bytes

STEP_MB = 64  # uppers come in multiples, so that empty images can be kept ready
MIN_MB = 16


class Disk:
    """Mounts below `home/mnt`, which is the working directory of the keeper."""

    def __init__(self, home: Home, box_id: str, limit_mb: int, root: bool) -> None:
        self.home, self.limit_mb, self.root = home, limit_mb, root
        self.live = home.box(box_id) / "live"
        self.layers: list[str] = []
        self.shown: dict[str, str] = {}
        self.upper_id = ""
        self.uses_image = root and os.path.exists("/dev/loop-control")
        self.mounted = False

    def prepare(self, template: str, runtime: str) -> None:
        """A private, empty working folder; called once."""
        ns.mount("tmpfs", str(self.home.mnt), "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, "size=64m")
        os.chdir(self.home.mnt)
        for name in ("root", "state", "bundle", "u"):
            os.mkdir(name)
        os.symlink(template, "t")
        os.symlink(runtime, "r")
        remove_tree(self.live, self.home.path)  # the upper of a keeper that died
        self.live.mkdir()

    @property
    def rootfs(self) -> str:
        return str(self.home.mnt / "root")

    def mount(self, layers: list[str]) -> None:
        """Assemble the root from sealed layers (oldest first) and a new empty upper."""
        for layer in layers:
            self._show_layer(layer)
        self.layers = list(layers)
        self._new_upper()
        self.remount()

    def remount(self) -> None:
        """The overlay alone, over the current upper."""
        lowers = [self.shown[layer] for layer in reversed(self.layers)]
        ns.mount_overlay("root", [*lowers, "r", "t"], "u/u", "u/w", self.root)
        self.mounted = True

    def _show_layer(self, layer: str) -> None:
        """Give a sealed layer a short name here, mounting it when it is an image."""
        if layer in self.shown:
            return
        number = len(self.shown)
        place = self.home.layers / layer
        if layer.endswith(".img"):
            os.mkdir(f"m{number}")
            ns.mount_image(place, f"m{number}", read_only=True)
            os.symlink(f"m{number}/u", f"l{number}")
        else:
            os.symlink(place, f"l{number}")
        self.shown[layer] = f"l{number}"

    def _new_upper(self) -> None:
        size = self._upper_mb()
        self.upper_id = new_id("l") + (".img" if self.uses_image else "")
        if self.uses_image:
            try:
                file = self.live / self.upper_id
                _copy_sparse(self._empty_image(size), file)
                ns.mount_image(file, "u", read_only=False)
            except OSError:
                (self.live / self.upper_id).unlink(missing_ok=True)
                self.uses_image = False  # loop devices are forbidden here; capabilities say so
                self.upper_id = self.upper_id.removesuffix(".img")
        if not self.uses_image:
            ns.mount("tmpfs", "u", "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, f"size={size}m")
        for name in ("u/u", "u/w"):
            os.makedirs(name, exist_ok=True)
        os.chmod("u/u", 0o755)

    def _upper_mb(self) -> int:
        """What the sealed layers left of the quota."""
        used = sum(_disk_bytes(self.home.layers / layer) for layer in self.layers) >> 20
        return max(self.limit_mb - used, MIN_MB)

    def _empty_image(self, size_mb: int) -> Path:
        size_mb = size_mb if size_mb < STEP_MB else -(-size_mb // STEP_MB) * STEP_MB
        place = self.home.bin / f"empty-{size_mb}.img"
        if not place.exists():
            aside = self.home.tmp / new_id("e")
            with open(aside, "wb") as handle:
                handle.truncate(size_mb << 20)
            options = ["-O", "^has_journal,^resize_inode", "-m", "0", "-b", "4096"]
            extended = "lazy_itable_init=1,nodiscard,root_owner=0:0"
            command = ["mkfs.ext4", "-q", "-F", *options, "-E", extended, str(aside)]
            env = {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                aside.unlink()
                raise OSError(f"mkfs.ext4: {done.stderr[-300:]}")
            os.rename(aside, place)
        return place

    def unmount(self) -> None:
        """Take the root and the upper apart; every process using them must be gone."""
        if self.mounted:
            ns.unmount("root")
            self.mounted = False

    def pending(self) -> str | None:
        """The name the upper will have as a layer; None when nothing was written."""
        return self.upper_id if any(os.scandir("u/u")) else None

    def seal(self) -> None:
        """Make the upper a durable layer, or drop it when nothing was written."""
        assert not self.mounted, "seal a root that is still mounted"
        if self.pending() is None:
            self.drop()
            return
        if self.uses_image:
            ns.unmount("u")
            file = self.live / self.upper_id
            _fsync(file)
            os.rename(file, self.home.layers / self.upper_id)
        else:
            aside = self.home.tmp / self.upper_id
            merge([Path("u/u")], aside, self.root)
            os.rename(aside, self.home.layers / self.upper_id)
            ns.unmount("u")
        _fsync(self.home.layers)

    def reopen(self) -> None:
        """After a seal that failed: the same upper, writable again."""
        file = self.live / self.upper_id
        if self.uses_image and not os.path.ismount("u") and file.exists():
            ns.mount_image(file, "u", read_only=False)
        self.remount()

    def drop(self) -> None:
        """Throw the upper away."""
        if os.path.ismount("u"):
            ns.unmount("u", lazy=True)
        if self.upper_id:
            (self.live / self.upper_id).unlink(missing_ok=True)

    def merge_layers(self) -> str:
        """One new sealed layer that means what the present ones mean together; its name."""
        name = new_id("l")
        aside = self.home.tmp / name
        layers = [Path(self.shown[layer]) for layer in self.layers]
        merge(layers, aside, self.root, [Path("r"), Path("t")])
        os.rename(aside, self.home.layers / name)
        _fsync(self.home.layers)
        return name

    def replace_layers(self, layers: list[str]) -> None:
        """What the next generation is built on; the mounted root stays as it is."""
        for layer in layers:
            self._show_layer(layer)
        self.layers = list(layers)

    def used_bytes(self) -> int:
        """Bytes of the live upper and the sealed layers."""
        live = os.statvfs("u") if self.mounted else None
        upper = (live.f_blocks - live.f_bfree) * live.f_frsize if live else 0
        return upper + sum(_disk_bytes(self.home.layers / layer) for layer in self.layers)


def _disk_bytes(path: Path) -> int:
    if path.is_dir():
        return tree_bytes(path)
    return os.stat(path).st_blocks * 512 if path.exists() else 0


def _copy_sparse(source: Path, target: Path) -> None:
    with open(source, "rb") as src, open(target, "xb") as out:
        size = os.fstat(src.fileno()).st_size
        out.truncate(size)
        at = 0
        while at < size:
            try:
                start = os.lseek(src.fileno(), at, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                return
            at = os.lseek(src.fileno(), start, os.SEEK_HOLE)
            os.lseek(out.fileno(), start, os.SEEK_SET)
            offset = start
            while offset < at:
                offset += os.sendfile(out.fileno(), src.fileno(), offset, at - offset)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
