"""kill -9 of managers and keepers at any moment: nothing stays behind, nothing paused is lost."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from box_checks import TIDY, settled
from openk3.errors import ConflictError, StorageError
from openk3.sandbox import Pool, Sandbox, State, events, recovery
from openk3.sandbox.store import gc
from openk3.sandbox.store.home import BoxLock, remove_tree
from openk3.sandbox.store.records import ImageManifest


def _manage(home, seconds: float) -> list[dict[str, str]]:
    """Run the manager for a while, kill -9 it, return what it had been promised."""
    script = str(Path(__file__).with_name("manager.py"))
    with subprocess.Popen(
        [sys.executable, script, str(home.path)], stdout=subprocess.PIPE, text=True
    ) as manager:
        assert manager.stdout
        lines = [manager.stdout.readline()]
        time.sleep(seconds)
        manager.send_signal(signal.SIGKILL)
        lines += manager.stdout.readlines()
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    assert not [row for row in rows if "failed" in row], rows
    return rows


def _kill_some_keepers(home, rng: random.Random) -> None:
    for folder in home.boxes.iterdir():
        pid = recovery.keeper_pid(folder)
        if pid and rng.random() < 0.5:
            with suppress(ProcessLookupError):  # it was ending anyway
                os.kill(pid, signal.SIGKILL)


async def _check(home, promised: dict[str, str]) -> None:
    """Every sandbox that was said to be paused is there with its content; then all are killed."""
    pool = Pool(home)
    known = {record.id for record in recovery.records(home)}
    assert promised.keys() <= known, "a paused sandbox is gone"
    for box_id, content in promised.items():
        assert await _insist(pool, box_id, "cat f") == content
    for record in recovery.records(home):
        await pool.kill(record.id)
    await pool.close()


async def _insist(pool: Pool, box_id: str, cmd: str) -> str:
    """What a command prints; asked again while a pause that nobody here began is under way."""
    while True:
        try:
            box = await Sandbox.connect(box_id, pool=pool)
            said = (await box.run(cmd)).stdout.strip()
        except ConflictError:
            await asyncio.sleep(0.05)
            continue
        await box.close()
        return said


def _cycles(home, num_cycles: int, seed: int) -> Counter:
    """Managers that live and are killed until they made `num_cycles` sandboxes; what happened."""
    rng = random.Random(seed)
    found: Counter = Counter()
    while found["created"] < num_cycles:
        began = time.time()
        promised: dict[str, str] = {}
        for row in _manage(home, rng.uniform(0.0, 4.0)):
            found["created"] += "created" in row
            if "paused" in row:
                promised[row["paused"]] = row["content"]
            if "killing" in row:
                promised.pop(row["killing"], None)
        _kill_some_keepers(home, rng)
        recovery.sweep(home)
        asyncio.run(_check(home, promised))
        recovery.sweep(home)
        assert settled(home) == TIDY
        found.update(rounds=1, paused_and_found=len(promised))
        names = {"recovered", "crashed", "resume_failed", "pause_failed", "sweep_failed", "damaged"}
        new = [row["event"] for row in events.read(home) if row["time"] >= began]
        found.update(name for name in new if name in names)
    # this home is shared with other tests: what their warm images and snapshots need stays
    named = gc.referenced_images(home)
    layers = {
        layer
        for name in named
        for layer in ImageManifest.load(ImageManifest.path(home, name)).layers
    }
    for _ in range(300):  # a sweep does nothing while somebody still uses the store
        gc.collect(home)
        kept = {place.name for place in home.images.iterdir()} - named
        kept |= {place.name for place in home.layers.iterdir()} - layers
        if not kept:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{kept} are never swept")


def test_reported_manager_killed_at_random_moments(home, gvisor):
    found = _cycles(home, 10, seed=1)
    assert found["paused_and_found"] > 0


@pytest.mark.slow
@pytest.mark.skipif("OPENK3_LONG" not in os.environ, reason="half an hour; set OPENK3_LONG=SEED")
def test_two_hundred_cycles_of_the_same(home, gvisor):
    """`OPENK3_LONG=1 pytest -s tests/sandbox/test_recovery.py -k two_hundred` prints its count."""
    found = _cycles(home, 200, seed=int(os.environ["OPENK3_LONG"]))
    print("\n" + ", ".join(f"{count} {name}" for name, count in sorted(found.items())))


def test_keeper_killed_while_running_and_while_pausing(aio, home, pool):
    async def go() -> None:
        box = await Sandbox.create(pool=pool)
        pid = recovery.keeper_pid(home.box(box.id))
        assert pid
        os.kill(pid, signal.SIGKILL)
        while (await box.refresh()).state == State.RUNNING:
            await asyncio.sleep(0.02)
        assert box.info.state == State.LOST
        assert "never been paused" in str(box.info.reason)
        with pytest.raises(LookupError, match="never been paused"):
            await Sandbox.connect(box.id, pool=pool)
        await box.kill()

        for wait in (0.0, 0.03, 0.06, 0.1):
            box = await Sandbox.create(pool=pool)
            await box.run("echo 1 > f")
            await box.pause()
            await box.resume()
            await box.run("echo 2 > f")
            pausing = asyncio.ensure_future(pool.pause(box.id))
            await asyncio.sleep(wait)
            if pid := recovery.keeper_pid(home.box(box.id)):  # else the pause was faster
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            acknowledged = not isinstance(
                (await asyncio.gather(pausing, return_exceptions=True))[0], BaseException
            )
            while (await box.refresh()).state == State.RUNNING:
                await asyncio.sleep(0.02)
            await box.resume()
            content = (await box.run("cat f")).stdout
            assert content == "2\n" if acknowledged else content in ("1\n", "2\n")
            await box.kill()
        recovery.sweep(home)

    aio.run(go())
    assert settled(home) == TIDY


def test_creation_dies_with_its_creator(aio, home, pool):
    """Given up at any moment; one that was complete by then is its caller's, and is killed."""

    async def go(wait: float) -> None:
        task = asyncio.ensure_future(Sandbox.create(pool=pool))
        await asyncio.sleep(wait)
        task.cancel()
        (made,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(made, Sandbox):
            await made.kill()

    for wait in (0.0, 0.05, 0.15, 0.3):
        aio.run(go(wait))
    assert settled(home) == TIDY


def test_time_limit_holds_without_any_manager(aio, home, pool):
    async def go() -> str:
        box = await Sandbox.create(pool=pool, timeout=0.5, on_timeout="kill")
        await box.close()
        return box.id

    box_id = aio.run(go())
    assert settled(home) == TIDY
    assert [row["event"] for row in events.read(home, box_id)] == ["created", "killed"]


def test_idle_sandbox_pauses_itself(aio, pool):
    async def go() -> None:
        box = await Sandbox.create(pool=pool, idle_pause=1.0)
        await _insist(pool, box.id, "echo x > f")
        while (await box.refresh()).state != State.PAUSED:
            await asyncio.sleep(0.05)
        assert await _insist(pool, box.id, "cat f") == "x"
        await pool.kill(box.id)

    aio.run(go())


def test_sweep_spares_what_is_owned_or_named(aio, home, pool):
    async def go() -> None:
        box = await Sandbox.create(pool=pool)
        await box.run("echo x > f")
        saved = await box.snapshot("keep")
        found = await asyncio.to_thread(recovery.sweep, home)
        assert found["running"] == 1
        assert (await box.run("cat f")).stdout == "x\n"
        await box.kill()
        await asyncio.to_thread(gc.collect, home)
        copy = await Sandbox.create(saved.id, pool=pool)
        assert (await copy.run("cat f")).stdout == "x\n"
        await copy.kill()
        pool.delete_snapshot("keep")

    aio.run(go())


def test_reported_cleanup_never_deletes_through_a_mount(home, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    victim = home.boxes / "crashed0000000000000"
    (victim / "root").mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(precious), str(victim / "root")], check=True)
    try:
        with pytest.raises(StorageError, match="mounted there"):
            remove_tree(victim, home.path)
        assert (precious / "file").read_text() == "kept"
    finally:
        subprocess.run(["umount", str(victim / "root")], check=True)
    remove_tree(victim, home.path)
    assert not victim.exists()
    with pytest.raises(StorageError, match="not inside"):
        remove_tree(precious, home.path)
    (home.tmp / "link").symlink_to(precious)
    remove_tree(home.tmp / "link", home.path)
    assert (precious / "file").read_text() == "kept"


def test_one_owner_at_a_time(home):
    folder = home.boxes / "locked00000000000000"
    folder.mkdir()
    lock = BoxLock(folder)
    with pytest.raises(RuntimeError, match="busy"):
        BoxLock(folder)
    with pytest.raises(ConflictError):  # it does not wait for what will not come
        BoxLock(folder, 3600.0, in_vain=lambda: True)
    lock.release()
    BoxLock(folder).release()
    remove_tree(folder, home.path)
