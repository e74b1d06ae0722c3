"""What a process may still take, in containers of both kinds and under a limit of addresses."""

import subprocess
import sys

import pytest

from openk3.obs import free_memory as module
from openk3.obs.env import total_memory
from openk3.obs.free_memory import free_memory

GIB = 1 << 30


def group(folder, names, limit, used, stat):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used, stat), strict=True):
        (folder / name).write_text(f"{value}\n")


V2 = ("memory.max", "memory.current", "memory.stat")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A machine with 64 GiB free, most of it as copies of files; `own` is the process's folder,
    `cgroup` holds its groups."""
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(module, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(module, "PROC", tmp_path / "own")
    monkeypatch.setattr(module, "MEMINFO", tmp_path / "meminfo")
    lines = f"MemTotal: {99 << 20} kB\nMemFree: {1 << 20} kB\nMemAvailable: {64 << 20} kB\n"
    (tmp_path / "meminfo").write_text(lines)
    return tmp_path


def within(system, lines):
    (system / "own" / "cgroup").write_text(lines + "\n")
    return free_memory()


def test_the_tightest_group_around_counts_and_pages_of_files_are_free(system):
    root = system / "cgroup"
    group(root / "a", V2, 8 * GIB, 5 * GIB, "inactive_file 1073741824")
    group(root / "a" / "b", V2, "max", 3 * GIB, "inactive_file 0")
    assert within(system, "0::/a/b") == 4 * GIB
    group(root / "a" / "b", V2, 4 * GIB, 3 * GIB, "inactive_file 0")
    assert within(system, "0::/a/b") == GIB
    assert within(system, "0::/elsewhere") == 64 * GIB


def test_the_first_version_of_groups_and_one_seen_from_inside(system):
    """Inside a container its path is that of the host, and the limit stands at the root."""
    root = system / "cgroup" / "memory"
    group(root, V1, 2 * GIB, 1 * GIB, "inactive_file 5\ntotal_inactive_file 1024")
    assert within(system, "7:blkio:/x\n4:memory:/docker/0123") == GIB + 1024
    group(root, V1, GIB, 2 * GIB, "total_inactive_file 0")
    assert within(system, "4:cpu,memory:/") == 1  # beyond its limit: nothing, but not unknown


def test_where_the_kernel_says_little_what_is_quite_free_counts(system):
    (system / "meminfo").write_text("MemTotal: 99 kB\n")
    assert 0 < within(system, "0::/") < total_memory()
    (system / "meminfo").unlink()
    assert 0 < within(system, "0::/") < total_memory()


def test_a_limit_of_addresses_counts():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30));"
        "from openk3.obs.free_memory import free_memory; print(free_memory())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert GIB // 2 < int(done.stdout) < GIB
