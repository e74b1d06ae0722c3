"""How much memory a process may still take: what its machine, container and own limit leave."""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc/self")
MEMINFO = Path("/proc/meminfo")


def free_memory() -> int | None:
    """Bytes of host memory that this process may still take, or None where nobody tells.

    The least of what the machine has free, what its control group (a container's limit) leaves and
    what its limit of addresses (`ulimit -v`) leaves.
    """
    return min(filter(None, (_machine(), *_control_groups(), _addresses())), default=None)


def _machine() -> int | None:
    """With what the kernel would give up of its copies of files: after a while they are nearly all
    of a machine's memory."""
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _addresses() -> int | None:
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        used = int((PROC / "statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (ImportError, OSError):  # no Unix; no Linux
        return None
    return max(limit - used, 1)


def _control_groups() -> list[int]:
    """What the process's group and those around it leave, in both versions of Linux's groups."""
    try:
        lines = (PROC / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used = CGROUPS, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, used = CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        here = root / path.lstrip("/")
        around = [g for g in (here, *here.parents) if g.is_relative_to(root)]
        found += [_left(group, limit, used) for group in around]  # some may not exist inside
    return [left for left in found if left is not None]


def _left(group: Path, limit: str, used: str) -> int | None:
    """None without a limit. Pages of files that were only read are free: the kernel drops them."""
    try:
        most = int((group / limit).read_text())  # version 2 says "max" where there is none
        taken = int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return max(most - taken + cached, 1)
