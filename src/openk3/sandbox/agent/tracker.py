"""Which processes belong to a command, however they detached themselves from it.

gVisor has its own cgroup filesystem: each command gets a group there, and a process cannot leave it
by `setsid`, double fork or a new process group. Elsewhere the environment marks the family.
"""

import ctypes
import os
import signal
import time
from pathlib import Path

MARK = "K3_JOB"


class GroupTracker:
    """Commands as cgroups in the sandbox's own `pids` hierarchy."""

    def __init__(self, root: str) -> None:
        self.root = root
        os.makedirs(root, exist_ok=True)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"k3", root.encode(), b"cgroup", 0, b"pids"):
            raise OSError(ctypes.get_errno(), "no cgroup filesystem in this sandbox")
        os.chmod(root, 0o755)

    def enter(self, job: str) -> None:
        os.makedirs(f"{self.root}/{job}", exist_ok=True)
        self._move(f"{self.root}/{job}")

    def leave(self) -> None:
        self._move(self.root)

    def _move(self, group: str) -> None:
        with open(f"{group}/cgroup.procs", "w") as handle:
            handle.write(str(os.getpid()))

    def pids(self, job: str) -> list[int]:
        try:
            with open(f"{self.root}/{job}/cgroup.procs") as handle:
                return [int(pid) for pid in handle.read().split() if int(pid) > 1]
        except FileNotFoundError:
            return []

    def forget(self, job: str) -> None:
        try:
            os.rmdir(f"{self.root}/{job}")
        except OSError:
            return  # still has members: its leader left servers behind on purpose


class ScanTracker:
    """Commands as families that share a marked environment, found by reading /proc."""

    def enter(self, job: str) -> None:
        del job

    def leave(self) -> None:
        return

    def pids(self, job: str) -> list[int]:
        found, mark = [], f"{MARK}={job}".encode()
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) <= 1:
                continue
            try:
                marked = mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                if marked and alive(int(name)):
                    found.append(int(name))
            except OSError:
                continue  # it ended while we looked
        return found

    def forget(self, job: str) -> None:
        del job


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state not in (b"Z", b"X")


def make_tracker() -> GroupTracker | ScanTracker:
    """The best tracker this sandbox offers."""
    try:
        return GroupTracker("/run/k3/jobs")
    except OSError:
        return ScanTracker()


def send_signal(pids: list[int], number: int) -> int:
    """Signal every listed process; how many took it."""
    sent = 0
    for pid in pids:
        try:
            os.kill(pid, number)
            sent += 1
        except ProcessLookupError:
            continue
    return sent


def kill_all(tracker: GroupTracker | ScanTracker, job: str, deadline_s: float = 2.0) -> None:
    """SIGKILL a family until nobody is left, for it may fork while we look."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        pids = [pid for pid in tracker.pids(job) if alive(pid)]
        if not pids:
            return
        send_signal(pids, signal.SIGKILL)
        time.sleep(0.002)
