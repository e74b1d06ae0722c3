"""Sandbox latencies on this machine, and on AgentENV when it is configured, in one table.

    python benchmarks/sandbox.py [--repeat 20] [--backend gvisor]

Medians in milliseconds. With E2B_API_URL set, the same steps run there and make a second column.
The last column is what the K3 report and AgentENV's own README publish for Firecracker machines.
"""

import argparse
import asyncio
import hashlib
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from openk3.sandbox import Limits, Pool, Sandbox, SnapshotInfo
from openk3.sandbox.engines import find

PUBLISHED = {"pause": "133", "resume to first answer": "49"}
TARGET = {
    "create cold to first output": 700,
    "create warm to first output": 450,
    "pause": 200,
    "resume to first answer": 450,
    "fork of 8": 1500,
    "answer beside a fork bomb": 1000,
    "answer beside a memory bomb": 1000,
    "answer beside an output bomb": 1000,
}
BOMBS = {
    "answer beside a fork bomb": "bomb() { bomb | bomb & }; bomb; sleep 1000",
    "answer beside a memory bomb": "while :; do head -c 2000000000 /dev/zero | tail; done",
    "answer beside an output bomb": "yes",
}


class Clock:
    """Times of named steps."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    async def time(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        started = time.perf_counter()
        value = await work()
        self.times.setdefault(name, []).append((time.perf_counter() - started) * 1000)
        return value


async def _answer(box: Sandbox) -> None:
    result = await box.run(["/bin/echo", "hello"])
    assert result.stdout == "hello\n", result


async def measure(
    make: Callable[..., Awaitable[Sandbox]], repeat: int, clock: Clock
) -> list[SnapshotInfo]:
    """Lives of `repeat` sandboxes, as many forks of eight, one 50 MB stream; the snapshots made."""
    saved: list[SnapshotInfo] = []

    async def born() -> Sandbox:
        box = await make()
        await _answer(box)
        return box

    async def back(box: Sandbox) -> None:
        await box.resume()
        await _answer(box)

    for _ in range(repeat):
        box = await clock.time("create warm to first output", born)
        await clock.time("one command", lambda box=box: _answer(box))
        await asyncio.sleep(0.2)
        await clock.time("pause", box.pause)
        await clock.time("resume to first answer", lambda box=box: back(box))
        saved.append(await clock.time("snapshot", box.snapshot))
        await clock.time("kill", box.kill)
    box = await make()
    for _ in range(repeat):

        async def fork(box: Sandbox = box) -> list[Sandbox]:
            copies = await box.fork(8)
            await asyncio.gather(*(_answer(copy) for copy in copies))
            return copies

        for copy in await clock.time("fork of 8", fork):
            await copy.kill()
    digest = hashlib.sha256()
    stream = box.run(["head", "-c", "50000000", "/dev/zero"], on_stdout=digest.update)
    await clock.time("stream of 50 MB", lambda: stream)
    assert digest.digest() == hashlib.sha256(bytes(50_000_000)).digest(), "bytes were lost"
    await box.kill()
    return saved


async def beside_bombs(pool: Pool, backend: str, repeat: int, clock: Clock) -> None:
    """How soon a sandbox answers while another one does its worst."""
    box = await Sandbox.create(pool=pool, backend=backend)
    for name, bomb in BOMBS.items():
        limits = Limits(cpus=0.5, processes=64, memory_mb=200)
        victim = await Sandbox.create(pool=pool, backend=backend, limits=limits)
        job = await victim.start(bomb)
        await asyncio.sleep(1)  # let it grow
        for _ in range(repeat):
            await clock.time(name, lambda: _answer(box))
        job.let_go()
        await victim.kill()
    await box.kill()


def _disk_bytes(home: Path) -> int:
    places = [home / name for name in ("images", "layers", "pages")]
    files = [file for place in places for file in place.rglob("*") if file.is_file()]
    return sum(file.stat().st_blocks * 512 for file in files)


async def second_snapshot(pool: Pool) -> tuple[float, float]:
    """MiB that a snapshot of a 200 MiB state takes, and a second one after 3 MiB of changes."""
    script = (
        "import os, sys\nb = bytearray(os.urandom(100 << 20))\nfor n in range(100):\n"
        " open(f'f{n}', 'wb').write(os.urandom(1 << 20))\nprint('ready', flush=True)\n"
        "for line in sys.stdin:\n b[:2 << 20] = os.urandom(2 << 20)\n"
        " open('f0', 'wb').write(os.urandom(1 << 20))\n print('ok', flush=True)"
    )
    box = await Sandbox.create(pool=pool, backend="gvisor")
    before = _disk_bytes(pool.home.path)
    job = await box.start(["python3", "-c", script], stdin=True)
    await anext(job)
    await box.snapshot()
    first = _disk_bytes(pool.home.path)
    await job.send(b"go\n")
    await anext(job)
    await box.snapshot()
    second = _disk_bytes(pool.home.path)
    await box.kill()
    return (first - before) / 2**20, (second - first) / 2**20


async def local(repeat: int, backend: str) -> tuple[Clock, tuple[float, float]]:
    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="openk3-bench-") as folder:
        pool = Pool(Path(folder) / "home")

        async def make() -> Sandbox:
            return await Sandbox.create(pool=pool, backend=backend)

        async def cold() -> Sandbox:
            box = await make()
            await _answer(box)
            return box

        await (await make()).kill()  # the self-test and the template are made once
        for _ in range(repeat):
            await (await clock.time("create cold to first output", cold)).kill()
        await pool.warm()
        await measure(make, repeat, clock)
        await beside_bombs(pool, backend, repeat, clock)
        sizes = await second_snapshot(pool)
        for saved in pool.snapshots():
            pool.delete_snapshot(saved.id)
        await pool.close()
    return clock, sizes


async def remote(repeat: int) -> Clock | None:
    if not os.environ.get("E2B_API_URL"):
        return None
    clock = Clock()

    async def make() -> Sandbox:
        return await Sandbox.create(os.environ.get("E2B_TEMPLATE", "base"), backend="agentenv")

    for saved in await measure(make, repeat, clock):
        await Sandbox.delete_snapshot(saved.id, backend="agentenv")
    return clock


def table(here: Clock, there: Clock | None, backend: str) -> list[str]:
    rows = [f"| step | {backend}: median (worst) | AgentENV: median (worst) | published | target |"]
    rows.append("|---|---|---|---|---|")
    for name, times in here.times.items():
        other = there.times.get(name) if there else None
        cells = [_cell(times), _cell(other) if other else "not configured"]
        rows.append(
            f"| {name} | {' | '.join(cells)} | {PUBLISHED.get(name, '')} | {TARGET.get(name, '')} |"
        )
    return rows


def _cell(times: list[float]) -> str:
    return f"{statistics.median(times):.0f} ({max(times):.0f}, n={len(times)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--backend", default="gvisor")
    options = parser.parse_args()
    before = os.getloadavg()
    here, sizes = asyncio.run(local(options.repeat, options.backend))
    there = asyncio.run(remote(options.repeat))
    after = os.getloadavg()
    engine = find(options.backend)
    print(f"{os.cpu_count()} CPUs, Linux {platform.release()}, {engine.program} {engine.version}")
    print(f"load before {before[0]:.1f}, after {after[0]:.1f}; {time.strftime('%Y-%m-%d')}")
    print("\n".join(table(here, there, options.backend)))
    print(
        f"snapshot of a 200 MiB state: {sizes[0]:.1f} MiB on disk; after touching 3 MiB the next "
        f"adds {sizes[1]:.1f} MiB (target 8)"
    )


if __name__ == "__main__":
    main()
