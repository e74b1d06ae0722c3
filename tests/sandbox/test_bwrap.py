"""Backend bwrap: files survive, processes do not, and it says so."""

import asyncio
import os
import signal

import pytest

from openk3.errors import BackendError, InputError, NotFoundError, OpenK3Error, StorageError
from openk3.sandbox import Limits, Pool, Sandbox, State, recovery
from openk3.sandbox.store.records import BoxRecord, ImageManifest


@pytest.fixture(scope="module")
def files_pool(home, bwrap, aio):
    async def make() -> Pool:
        return Pool(home)

    async def tidy(pool: Pool) -> None:
        await pool.close()
        for record in recovery.records(home):
            await pool.kill(record.id)

    pool = aio.run(make())
    yield pool
    aio.run(tidy(pool))


async def _make(pool: Pool, **options) -> Sandbox:
    return await Sandbox.create(pool=pool, backend="bwrap", **{"timeout": 1200, **options})


def test_auto_never_takes_it_unasked(aio, files_pool, monkeypatch):
    monkeypatch.setenv("OPENK3_RUNSC", "/nowhere/runsc")
    with pytest.raises(BackendError, match="allow_files_only"):
        aio.run(Sandbox.create(pool=files_pool))
    box = aio.run(Sandbox.create(pool=files_pool, allow_files_only=True))
    assert (box.info.backend, box.info.isolation) == ("bwrap", "namespace")
    assert not box.info.capabilities.memory
    aio.run(box.kill())


def test_commands_files_and_isolation(aio, files_pool, tmp_path):
    (tmp_path / "key").write_text("secret")

    async def go() -> None:
        box = await _make(files_pool)
        assert (await box.run("id -un; pwd")).stdout == "user\n/home/user\n"
        result = await box.run("(sleep 3210 &); setsid sleep 3210 & sleep 3210", timeout=1)
        assert result.timed_out
        assert "3210" not in (await box.run("ps ax -o args | grep [3]210", user="root")).stdout
        for path in (str(tmp_path / "key"), "/proc/1/root" + str(tmp_path / "key")):
            with pytest.raises(OpenK3Error):
                await box.files.read(path, user="root")
        seen = await box.run("ls /proc | grep -c '^[0-9]'; ls /sys /work; cat /proc/net/dev")
        assert int(seen.stdout.split()[0]) < 12
        assert "eth0" not in seen.stdout
        assert (await box.run("mount -t tmpfs x /mnt; chroot /", user="root")).exit_code != 0
        assert (await box.run("echo x > /proc/sys/kernel/hostname", user="root")).exit_code != 0
        await box.kill()

    name = os.uname().nodename
    aio.run(go())
    assert os.uname().nodename == name


def test_pause_says_that_processes_do_not_survive(aio, files_pool):
    async def go() -> None:
        box = await _make(files_pool)
        await box.run("echo kept > f")
        with pytest.raises(InputError, match="memory=False"):
            await box.pause()
        assert (await box.run("cat f")).stdout == "kept\n"
        await box.kill()

    aio.run(go())


def test_reported_files_survive_every_cycle_without_memory(aio, files_pool):
    async def go() -> None:
        box = await _make(files_pool)
        await box.run("echo kept > f")
        for cycle in range(5):
            await box.run(f"echo {cycle} > f{cycle}; rm -f f{cycle - 1}; sleep 999 &")
            await box.pause(memory=False)
            assert box.info.state == State.PAUSED
            await box.resume()
            left = await box.run("ls; pgrep sleep")
            assert left.stdout == f"f\nf{cycle}\n"
        await box.kill()

    aio.run(go())


def test_reported_late_write_survives_a_files_only_pause_by_timeout(aio, files_pool):
    async def go() -> None:
        box = await _make(files_pool, timeout=None, on_timeout="pause", allow_files_only=True)
        before = (await box.run("head -c 8000000 /dev/urandom > big; sha256sum big")).stdout
        await box.set_timeout(0.1)
        while (await box.refresh()).state != State.PAUSED:
            await asyncio.sleep(0.05)
        await box.resume(timeout=600)
        assert (await box.run("sha256sum big")).stdout == before
        await box.kill()

    aio.run(go())


def test_reported_failed_pause_leaves_the_files_only_sandbox_running(aio, home, files_pool):
    async def go() -> None:
        box = await _make(files_pool)
        await box.run("echo kept > f")
        os.rename(home.images, home.path / "images-away")
        try:
            with pytest.raises(StorageError, match="could not save"):
                await box.pause(memory=False)
        finally:
            os.rename(home.path / "images-away", home.images)
        assert (await box.run("cat f")).stdout == "kept\n"
        await box.pause(memory=False)
        await box.resume()
        assert (await box.run("cat f")).stdout == "kept\n"
        await box.kill()

    aio.run(go())


def test_reported_lost_layer_is_a_clean_error_and_deletable(aio, home, files_pool):
    async def go() -> None:
        box = await _make(files_pool)
        await box.run("echo kept > f")
        await box.pause(memory=False)
        record = BoxRecord.load(BoxRecord.path(home, box.id))
        (layer,) = ImageManifest.load(ImageManifest.path(home, record.image)).layers
        os.rename(home.layers / layer, home.path / "away")
        with pytest.raises(OpenK3Error, match=layer):
            await box.resume()
        assert (await box.refresh()).state == State.PAUSED
        os.rename(home.path / "away", home.layers / layer)
        await box.resume()
        assert (await box.run("cat f")).stdout == "kept\n"
        await box.pause(memory=False)
        os.unlink(home.layers / layer)
        assert await box.kill()
        assert not await box.kill()

    aio.run(go())


def test_reported_keeper_killed_falls_back_to_the_last_saved_files(aio, home, files_pool):
    async def go() -> None:
        box = await _make(files_pool)
        await box.run("echo one > f")
        await box.pause(memory=False)
        await box.resume()
        await box.run("echo two > f")
        pid = recovery.keeper_pid(home.box(box.id))
        assert pid
        os.kill(pid, signal.SIGKILL)
        while (await box.refresh()).state == State.RUNNING:
            await asyncio.sleep(0.02)
        assert box.info.state == State.PAUSED
        await box.resume()
        assert (await box.run("cat f")).stdout == "one\n"
        await box.kill()

    aio.run(go())


def test_fork_and_snapshot_of_files(aio, files_pool):
    async def go() -> None:
        box = await _make(files_pool)
        await box.run("echo one > f")
        for unasked in (box.snapshot("files"), box.fork(1)):
            with pytest.raises(InputError, match="memory=False"):
                await unasked
        saved = await box.snapshot("files", memory=False)
        assert not saved.memory
        await box.run("echo two > f")
        await box.pause(memory=False)
        (copy,) = await box.fork(1)
        assert (await copy.run("cat f")).stdout == "two\n"
        (second,) = await copy.fork(1, memory=False)
        assert (await second.run("cat f")).stdout == "two\n"
        assert await second.kill()
        with pytest.raises(BackendError, match="made by backend bwrap"):
            await Sandbox.create(saved.id, pool=files_pool, backend="gvisor")
        again = await Sandbox.create(saved.id, pool=files_pool, backend="bwrap")
        assert (await again.run("cat f")).stdout == "one\n"
        for each in (box, copy, again):
            assert await each.kill()
        files_pool.delete_snapshot("files")
        with pytest.raises(NotFoundError):
            files_pool.find_snapshot("files")

    aio.run(go())


def test_reported_bombs_end_that_files_only_sandbox(aio, files_pool):
    async def go() -> None:
        other = await _make(files_pool)
        victim = await _make(files_pool, limits=Limits(memory_mb=128, processes=64, disk_mb=32))
        bomb = await victim.start("bomb() { bomb | bomb & }; bomb; sleep 100")
        assert (await asyncio.wait_for(other.run("echo fine"), 30)).stdout == "fine\n"
        bomb.let_go()
        full = await other.run("head -c 9000000 /dev/zero > f; ls -s f | cut -d' ' -f1")
        assert int(full.stdout) > 8000
        assert await victim.kill()
        await other.kill()

    aio.run(go())
