"""Kernel limits of one sandbox: cgroup v1 or v2, as root; absent for ordinary users."""

import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
FAMILY = "openk3"
PERIOD_US = 100_000
HOST_TASKS = 2048  # threads of gVisor itself; it counts the user's processes on its own
CONTROLLERS = ("memory", "cpu", "pids")


def _families() -> dict[str, Path]:
    """Controller -> the folder under which this project makes its groups; empty when none."""
    if os.geteuid() != 0:
        return {}
    found = {}
    for controller in CONTROLLERS:
        v1 = ROOT / controller
        if (v1 / "cgroup.procs").exists() and os.access(v1, os.W_OK):
            found[controller] = v1 / FAMILY
    if found:
        return found
    controllers = ROOT / "cgroup.controllers"
    if controllers.exists() and os.access(ROOT / "cgroup.subtree_control", os.W_OK):
        names = controllers.read_text().split()
        return {name: ROOT / FAMILY for name in CONTROLLERS if name in names}
    return {}


def available() -> set[str]:
    """Which of memory, cpu and pids can be limited here."""
    return set(_families())


class Group:
    """The cgroup of one sandbox, in every hierarchy that is to be had."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folders: dict[str, Path] = {}

    def create(self, cpus: float, memory_mb: int, tasks: int = HOST_TASKS) -> None:
        """Make the groups and set their limits. OSError where the kernel refuses."""
        families = _families()
        for family in set(families.values()):
            family.mkdir(exist_ok=True)
            if (ROOT / "cgroup.controllers").exists() and family.parent == ROOT:
                for folder in (ROOT, family):
                    _write(folder / "cgroup.subtree_control", " ".join(f"+{c}" for c in families))
        for controller, family in families.items():
            folder = family / self.name
            folder.mkdir(exist_ok=True)
            self.folders[controller] = folder
        v2 = (ROOT / "cgroup.controllers").exists() and not (ROOT / "memory").is_dir()
        memory, quota = memory_mb << 20, int(cpus * PERIOD_US)
        if "memory" in self.folders:
            name = "memory.max" if v2 else "memory.limit_in_bytes"
            _write(self.folders["memory"] / name, str(memory))
        if "cpu" in self.folders and v2:
            _write(self.folders["cpu"] / "cpu.max", f"{quota} {PERIOD_US}")
        elif "cpu" in self.folders:
            _write(self.folders["cpu"] / "cpu.cfs_period_us", str(PERIOD_US))
            _write(self.folders["cpu"] / "cpu.cfs_quota_us", str(quota))
        if "pids" in self.folders:
            _write(self.folders["pids"] / "pids.max", str(tasks))

    def procs_files(self) -> list[str]:
        """Files to write a process id to, to put it into the group."""
        return sorted({str(folder / "cgroup.procs") for folder in self.folders.values()})

    def memory_bytes(self) -> int:
        """Memory charged to the group now; 0 when unknown."""
        folder = self.folders.get("memory")
        for name in ("memory.usage_in_bytes", "memory.current"):
            if folder and (folder / name).exists():
                return int((folder / name).read_text())
        return 0

    def oom_kills(self) -> int:
        """How often the kernel killed in this group for lack of memory."""
        folder = self.folders.get("memory")
        for name in ("memory.oom_control", "memory.events"):
            if folder and (folder / name).exists():
                for line in (folder / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """Delete the groups; their processes must have ended."""
        remove_groups(list(self.folders.values()))


def groups_named(name: str) -> list[Path]:
    """Existing groups of one sandbox, whoever made them."""
    return [place / name for place in set(_families().values()) if (place / name).is_dir()]


def all_names() -> set[str]:
    """Names of all groups of this project on the machine."""
    names: set[str] = set()
    for family in set(_families().values()):
        if family.is_dir():
            names |= {place.name for place in family.iterdir() if place.is_dir()}
    return names


def processes_in(folder: Path) -> list[int]:
    """Process ids in one group."""
    try:
        return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def remove_groups(folders: list[Path], wait_s: float = 2.0) -> bool:
    """Delete groups, waiting for dying members. False when some are still in use."""
    end = time.monotonic() + wait_s
    for folder in folders:
        while folder.is_dir():
            try:
                folder.rmdir()
            except OSError:
                if time.monotonic() > end:
                    return False
                time.sleep(0.005)
    return True


def _write(path: Path, value: str) -> None:
    path.write_text(value)
