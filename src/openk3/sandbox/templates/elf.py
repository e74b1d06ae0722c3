"""Copying programs of this machine, with the libraries they need, into a root folder."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from openk3.errors import BackendError

_LINE = re.compile(r"(?:(\S+) => )?(/\S+) \(0x")


def libraries(*programs: Path) -> dict[str, Path]:
    """Soname -> file for all that programs or shared objects load; empty when static."""
    if not programs:
        return {}
    command = ["ldd", *map(str, programs)]  # one run: each costs several processes
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {}
    for line in done.stdout.splitlines():
        if match := _LINE.search(line):
            path = Path(match.group(2))
            found[match.group(1) or path.name] = path
        elif "not found" in line:
            raise BackendError(f"{line.split()[0]} is missing on this machine: {command[1:4]}")
    return found


def loader_name(found: dict[str, Path]) -> str | None:
    """The dynamic loader among `libraries(...)`."""
    names = [path for path in found.values() if path.name.startswith(("ld-linux", "ld-musl"))]
    return str(names[0]) if names else None


class Root:
    """A merged-/usr root folder under construction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("usr/bin", "usr/lib", "usr/lib64", "usr/local/bin", "usr/local/lib"):
            (path / name).mkdir(parents=True)
        for name in ("bin", "lib", "lib64"):
            (path / name).symlink_to(f"usr/{name}")
        (path / "sbin").symlink_to("usr/bin")
        (path / "usr/sbin").symlink_to("bin")

    def put(self, source: Path, target: str) -> None:
        """Copy one file to absolute `target` inside, once."""
        place = self.path / target.lstrip("/")
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(os.path.realpath(source), place)

    def put_libraries(self, *programs: Path) -> None:
        """Libraries go where this machine's loader looks by default: to the folder of its libc."""
        found = libraries(*programs)
        homes = [path.parent for name, path in found.items() if name.startswith("libc.")]
        for name, path in found.items():
            if path.name.startswith(("ld-linux", "ld-musl")):
                self.put(path, str(path))
            else:
                self.put(path, f"{homes[0] if homes else '/usr/lib'}/{name}")

    def put_programs(self, names: Iterable[str]) -> list[str]:
        """Copy programs found on PATH to /usr/bin; the names this machine lacks."""
        found = {name: shutil.which(name) for name in names}
        places = {name: Path(os.path.realpath(place)) for name, place in found.items() if place}
        for name, place in places.items():
            self.put(place, f"/usr/bin/{name}")
        self.put_libraries(*places.values())
        return [name for name, place in found.items() if not place]
