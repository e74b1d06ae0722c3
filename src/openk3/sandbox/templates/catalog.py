"""Named templates: `templates/NAME-HASH/rootfs`, immutable, and `templates/NAME.json` that says
which of them NAME means now. Paused sandboxes keep the one they began with."""

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openk3.errors import InputError, NotFoundError, StorageError
from openk3.sandbox.store.home import Home, new_id, remove_tree
from openk3.sandbox.store.layers import sync_filesystem
from openk3.sandbox.store.records import Record
from openk3.sandbox.templates import hostpython, runtime

NAME = re.compile(r"[a-z0-9][a-z0-9_.]{0,39}")


@dataclass
class TemplateRecord(Record):
    """`templates/NAME.json`."""

    id: str
    name: str
    source: str
    created: float = 0.0


@dataclass(frozen=True)
class Template:
    """A root folder that sandboxes start from."""

    id: str
    root: Path


def add(home: Home, name: str, source: str, content: str, fill: Callable[[Path], Any]) -> Template:
    """Make template `name` with `fill(rootfs)`; `content` identifies what it will hold."""
    if not NAME.fullmatch(name):
        raise InputError(f"template name {name!r}: lower-case letters, digits, '.' and '_' only")
    template_id = f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    folder = home.templates / template_id
    if not folder.exists():
        _build(home, folder, fill)
    record = TemplateRecord(template_id, name, source, time.time())
    record.save(home.templates / f"{name}.json")
    return Template(template_id, folder / "rootfs")


def _build(home: Home, folder: Path, fill: Callable[[Path], Any]) -> None:
    """Aside, synced as a whole (thousands of files), then renamed."""
    aside = home.tmp / new_id("t")
    try:
        (aside / "rootfs").mkdir(parents=True)
        fill(aside / "rootfs")
        add_mount_points(aside / "rootfs")
        sync_filesystem(aside)
        os.rename(aside, folder)
    except OSError as error:
        if not folder.exists():  # two processes made the same one at once: either will do
            raise StorageError(f"cannot make template {folder.name}: {error}") from error
    finally:
        remove_tree(aside, home.path)


def get(home: Home, name: str) -> Template:
    """The template of a name or id; `python` and `empty` are made when first asked for.

    Raises NotFoundError.
    """
    if (home.templates / name / "rootfs").is_dir() and "/" not in name:
        return Template(name, home.templates / name / "rootfs")
    pointer = home.templates / f"{name}.json"
    if NAME.fullmatch(name) and pointer.exists():
        record = TemplateRecord.load(pointer)
        if name not in BUILTIN or record.id == _builtin_id(name):
            return Template(record.id, home.templates / record.id / "rootfs")
    if name in BUILTIN:
        content, fill = BUILTIN[name]()
        return add(home, name, "this machine", content, fill)
    known = ", ".join(sorted({place.stem for place in home.templates.glob("*.json")} | {*BUILTIN}))
    raise NotFoundError(f"no template {name!r}; there are: {known}")


def _builtin_id(name: str) -> str:
    return f"{name}-{hashlib.sha256(BUILTIN[name]()[0].encode()).hexdigest()[:8]}"


def _python() -> tuple[str, Callable[[Path], Any]]:
    source = Path(hostpython.__file__).read_text()
    return f"{sys.version} {runtime.base_python()} {source}", hostpython.fill


def _empty() -> tuple[str, Callable[[Path], Any]]:
    return "empty 1", lambda root: None


BUILTIN: dict[str, Callable[[], tuple[str, Callable[[Path], Any]]]] = {
    "python": _python,
    "empty": _empty,
}


def add_mount_points(root: Path) -> None:
    """Folders that the isolating program mounts on, and users to be, where they are missing."""
    for name in ("proc", "sys", "dev", "run", "tmp", "etc", "root", "home/user", "var/tmp"):
        place = root / name
        if not os.path.lexists(place):
            place.mkdir(parents=True)
            if os.geteuid() == 0 and name == "home/user":
                os.chown(place, 1000, 1000)
            if name.endswith("tmp"):
                place.chmod(0o1777)
    passwd = root / "etc" / "passwd"
    if not os.path.lexists(passwd):
        shell = "/bin/bash" if (root / "bin" / "bash").exists() else "/bin/sh"
        passwd.write_text(
            f"root:x:0:0:root:/root:{shell}\nuser:x:1000:1000:user:/home/user:{shell}\n"
        )
        (root / "etc" / "group").write_text("root:x:0:\nuser:x:1000:\n")
    elif not passwd.is_symlink() and "\nuser:" not in f"\n{passwd.read_text(errors='replace')}":
        with open(passwd, "a") as handle:
            handle.write("user:x:1000:1000:user:/home/user:/bin/sh\n")


def describe(home: Home) -> list[dict[str, Any]]:
    """All named templates, for `k3 sandbox setup`."""
    rows = []
    for pointer in sorted(home.templates.glob("*.json")):
        record = TemplateRecord.load(pointer)
        warm = (home.templates / f"{record.id}.warm").exists()
        rows.append({"name": record.name, "id": record.id, "source": record.source, "warm": warm})
    return rows
