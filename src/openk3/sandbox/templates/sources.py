"""Templates from elsewhere: a folder, an OCI or docker archive, debootstrap."""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

from openk3.errors import BackendError, InputError
from openk3.sandbox import engines
from openk3.sandbox.store.home import Home
from openk3.sandbox.templates import catalog
from openk3.sandbox.templates.catalog import Template

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"


def add(home: Home, name: str, source: str) -> Template:
    """Make template `name` from `source`: a folder, a tar archive, or `debootstrap:SUITE`.

    Raises InputError for anything else, BackendError when debootstrap is missing or fails.
    """
    if source.startswith("debootstrap:"):
        suite = source.partition(":")[2]
        return catalog.add(home, name, source, source, lambda root: _debootstrap(root, suite))
    place = Path(source)
    if place.is_dir():
        content = f"{place.resolve()} {_newest(place)}"
        return catalog.add(home, name, source, content, lambda root: _copy_folder(place, root))
    if place.is_file() and tarfile.is_tarfile(place):
        content = hashlib.sha256(place.read_bytes()).hexdigest()
        return catalog.add(home, name, source, content, lambda root: _unpack_image(place, root))
    raise InputError(f"{source!r}: a folder, an OCI archive (tar) or debootstrap:SUITE is needed")


def _newest(folder: Path) -> float:
    return max((os.lstat(place).st_mtime for place in [folder, *folder.rglob("*")]), default=0.0)


def _copy_folder(source: Path, root: Path) -> None:
    shutil.copytree(source, root, symlinks=True, dirs_exist_ok=True, ignore=_ignore_devices)


def _ignore_devices(folder: str, names: list[str]) -> list[str]:
    ordinary = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)
    modes = {name: os.lstat(os.path.join(folder, name)).st_mode for name in names}
    return [name for name, mode in modes.items() if not any(test(mode) for test in ordinary)]


def _debootstrap(root: Path, suite: str) -> None:
    if not shutil.which("debootstrap"):
        raise BackendError("debootstrap is not installed: apt-get install debootstrap")
    if os.geteuid() != 0:
        raise BackendError("debootstrap needs root; make the template from an OCI archive instead")
    command = ["debootstrap", "--variant=minbase", *_mirror_words(suite, str(root))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendError(f"debootstrap {suite}: {(done.stderr or done.stdout)[-400:]}")


def _mirror_words(suite: str, root: str) -> list[str]:
    """The suite from the mirror this machine uses; debootstrap's own default without one."""
    for line in engines.mirror_lines(suite):
        keyring = re.search(r"\[signed-by=(\S+)\]", line)
        mirror = re.search(r"\s(\S+) \S+ main$", line)
        if mirror:
            key = [f"--keyring={keyring.group(1)}"] if keyring else []
            return [*key, suite, root, mirror.group(1)]
    return [suite, root]


def _unpack_image(archive: Path, root: Path) -> None:
    """Layers in order, with the format's own whiteouts. A plain root tar is one layer."""
    with tarfile.open(archive) as outer:
        names = {member.name.removeprefix("./"): member for member in outer.getmembers()}
        layers = _layer_names(outer, names)
        if layers is None:
            _unpack_layer(outer, root)
            return
        for layer in layers:
            if layer not in names:
                raise InputError(f"{archive}: layer {layer} is missing")
            handle = outer.extractfile(names[layer])
            with tarfile.open(fileobj=handle, mode="r:*") as inner:
                _unpack_layer(inner, root)


def _layer_names(outer: tarfile.TarFile, names: dict[str, tarfile.TarInfo]) -> list[str] | None:
    def read(name: str) -> dict:
        handle = outer.extractfile(names[name])
        return json.loads(handle.read()) if handle else {}

    if "manifest.json" in names:  # docker save
        return list(read("manifest.json")[0]["Layers"])  # pyright: ignore[reportArgumentType]
    if "index.json" not in names:
        return None
    found = read("index.json")["manifests"][0]["digest"]
    manifest = read("blobs/" + found.replace(":", "/"))
    if "manifests" in manifest:  # an index of platforms: the first is taken
        found = manifest["manifests"][0]["digest"]
        manifest = read("blobs/" + found.replace(":", "/"))
    return ["blobs/" + layer["digest"].replace(":", "/") for layer in manifest["layers"]]


def _unpack_layer(layer: tarfile.TarFile, root: Path) -> None:
    for member in layer:
        target = root / member.name
        name = os.path.basename(member.name.rstrip("/"))
        if name == OPAQUE:
            _empty(_inside(root, target.parent))
        elif name.startswith(WHITEOUT):
            _remove(_inside(root, target.parent) / name.removeprefix(WHITEOUT))
        elif not (member.ischr() or member.isblk() or member.isfifo()):
            _place(layer, member, root)


def _place(layer: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    """One member, never through a symlink that leads out of the root."""
    target = root / member.name
    parent = _inside(root, target.parent)
    place = parent / target.name
    if not member.isdir() and os.path.lexists(place):
        _remove(place)
    if os.geteuid() != 0:
        member.uid, member.gid = os.geteuid(), os.getegid()
    member.mode &= 0o7777
    if member.issym():
        parent.mkdir(parents=True, exist_ok=True)
        os.symlink(member.linkname, place)
        return
    layer.extract(member, root, filter="fully_trusted")


def _inside(root: Path, folder: Path) -> Path:
    real = folder.resolve()
    if root.resolve() not in [real, *real.parents]:
        raise InputError(f"the archive places a file outside of its root: {folder}")
    return real


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _empty(folder: Path) -> None:
    if folder.is_dir():
        for place in list(folder.iterdir()):
            _remove(place)
