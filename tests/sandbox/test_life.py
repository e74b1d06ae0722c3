"""Pause, resume, fork and snapshot of gVisor machines. "Reported" marks faults of other systems."""

import asyncio
import os
import subprocess
import sys
import time

import pytest

from box_checks import TIDY, settled
from openk3.errors import CheckpointError, ConflictError, InputError, NotFoundError, StorageError
from openk3.sandbox import Pool, Sandbox, State, recovery
from openk3.sandbox.keeper import cgroups
from openk3.sandbox.store import gc
from openk3.sandbox.store.records import BoxRecord, ImageManifest


def test_reported_files_and_processes_survive_every_cycle(aio, fresh):
    """Files lost after the second resume; the second resume fails: five cycles of both."""

    async def go() -> None:
        counter = await fresh.start(
            # written aside: a reader must not meet a file that was just emptied
            "n=0; while true; do n=$((n+1)); echo $n > /tmp/m; mv /tmp/m /tmp/n; sleep 0.02; done",
            detach=True,
        )
        counter.let_go()
        last = 0
        for cycle in range(5):
            await fresh.run(f"echo {cycle} > f{cycle}")
            await fresh.pause()
            assert fresh.info.state == State.PAUSED
            await fresh.resume()
            listing = await fresh.run("cat f*; cat /tmp/n")
            *files, count = listing.stdout.split()
            assert files == [str(n) for n in range(cycle + 1)]
            assert int(count) >= last
            last = int(count)
        assert last > 1

    aio.run(go())


def test_reported_late_write_without_sync_survives_pause_by_timeout(aio, pool):
    async def go() -> None:
        box = await Sandbox.create(pool=pool, timeout=None, on_timeout="pause")
        script = "dd if=/dev/urandom of=big bs=1M count=8 2>/dev/null; sha256sum big"
        before = (await box.run(script)).stdout
        await box.set_timeout(0.1)
        while (await box.refresh()).state != State.PAUSED:
            await asyncio.sleep(0.05)
        await box.resume(timeout=600)
        assert (await box.run("sha256sum big")).stdout == before
        await box.kill()

    aio.run(go())


def test_paused_sandbox_holds_no_process(aio, home, fresh):
    async def go() -> None:
        await fresh.pause()
        pid = recovery.keeper_pid(home.box(fresh.id))
        while pid and os.path.exists(f"/proc/{pid}/ns/pid"):
            await asyncio.sleep(0.01)
        assert not cgroups.groups_named(recovery.group_name(home, fresh.id))

    aio.run(go())


def test_reported_clock_is_right_after_a_pause(aio, fresh):
    async def go() -> None:
        await fresh.pause()
        await asyncio.sleep(2.0)
        await fresh.resume()
        before = time.time()
        inside = float((await fresh.run("date +%s.%N")).stdout)
        assert before - 0.5 < inside < time.time() + 0.5

    aio.run(go())


def test_reported_command_right_after_each_of_twenty_resumes(aio, pool, fresh):
    """A connection of an earlier generation, used again at once, must not stall or fail."""

    async def go() -> None:
        other = await Sandbox.connect(fresh.id, pool=pool)
        for cycle in range(20):
            await other.run(f"echo {cycle} >> log")
            await fresh.pause()
            await fresh.resume()
            assert (await fresh.run("tail -1 log")).stdout == f"{cycle}\n"
        assert (await other.run("wc -l < log")).stdout == "20\n"
        await other.close()

    aio.run(go())


def test_reported_connect_from_another_process_resumes(aio, home, fresh):
    script = f"""
import asyncio
from openk3.sandbox import Pool, Sandbox
async def go():
    box = await Sandbox.connect({fresh.id!r}, pool=Pool({str(home.path)!r}))
    print((await box.run("cat note")).stdout, end="")
asyncio.run(go())
"""

    async def before() -> None:
        await fresh.files.write("note", "still here")
        await fresh.pause()

    aio.run(before())
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("still here", 0), done.stderr
    aio.run(fresh.refresh())
    assert fresh.info.state == State.RUNNING


def test_reported_running_command_streams_on_through_snapshot_and_fork(aio, fresh):
    """An image of a box with a live command could not be restored, or its output stopped."""

    async def go() -> None:
        script = "i=0; until [ -e go ]; do i=$((i+1)); echo L$i; sleep 0.02; done; echo end"
        started = asyncio.Event()
        streaming = asyncio.create_task(fresh.run(script, on_stdout=lambda _: started.set()))
        await started.wait()
        await fresh.snapshot()
        copies = await fresh.fork(2)
        for copy in copies:
            job = await copy.attach(pid=(await copy.processes())[0]["pid"])
            await copy.run("touch go")
            *rest, end = (await job.wait()).stdout.split()
            first = int(rest[0].removeprefix("L")) if rest else 0
            assert rest == [f"L{first + n}" for n in range(len(rest))]
            assert end == "end"
            await copy.kill()
        await fresh.run("touch go")
        lines = (await streaming).stdout.split()
        assert lines == [f"L{n}" for n in range(1, len(lines))] + ["end"]

    aio.run(go())


def test_reported_command_stuck_in_a_write_goes_on_after_snapshot_and_fork(aio, fresh):
    """Nobody reads, the pipe is full, and the machine is saved in that very moment."""
    count = 3_000_000

    async def go() -> None:
        job = await fresh.start(f"yes | head -c {count}; echo end >&2", detach=True, tag="w")
        while (await fresh.run("cat /proc/$(pgrep -x head)/stat | cut -d' ' -f3")).stdout != "S\n":
            await asyncio.sleep(0.02)
        (copy,) = await fresh.fork(1)
        rest = await (await copy.attach(tag="w")).wait()
        assert (rest.exit_code, rest.stderr) == (0, "end\n")
        assert set(rest.stdout) == {"y", "\n"}
        await copy.kill()
        result = await job.wait()
        assert result.stdout == ("y\n" * count)[:count]
        assert result.stderr == "end\n"

    aio.run(go())


def test_reported_forks_get_identities_and_randomness_of_their_own(aio, fresh):
    async def go() -> None:
        script = (
            "import random, os, time\nrandom.seed(1)\nopen('ready','w')\n"
            "while not os.path.exists('go'): time.sleep(0.01)\n"
            "print(random.random(), os.urandom(8).hex())"
        )
        job = await fresh.start(["python3", "-c", script], detach=True, tag="rng")
        job.let_go()
        await fresh.run("until [ -e ready ]; do sleep 0.01; done; echo mine > file")
        copies = await fresh.fork(3)
        everyone = [fresh, *copies]
        drawn, names, generations = [], [], []
        for member in everyone:
            await member.run("touch go")
            drawn += (await (await member.attach(tag="rng")).wait()).stdout.split()
            names.append((await member.run("hostname; echo $K3_SANDBOX_ID")).stdout)
            generations.append((await member.run("cat /run/k3/generation")).stdout)
            assert (await member.refresh()).generation == generations[-1].strip()
        assert len(set(drawn)) == 8
        assert len(set(names)) == len(set(generations)) == 4
        await copies[0].run("echo other > file")
        assert [(await m.run("cat file")).stdout for m in everyone] == [
            "mine\n",
            "other\n",
            "mine\n",
            "mine\n",
        ]
        for copy in copies:
            await copy.kill()

    aio.run(go())


def test_snapshot_is_immutable_and_outlives_its_sandbox(aio, pool, fresh):
    async def go() -> None:
        await fresh.run("echo one > f; mkdir d; echo x > d/x")
        first = await fresh.snapshot("first")
        await fresh.run("echo two > f; rm -r d; mkdir d; echo y > d/y")
        second = await fresh.snapshot("second")
        await fresh.pause()
        paused = await fresh.snapshot("third")  # of a paused one: the same state again
        await fresh.kill()
        for saved, expected in (
            (first, "one\nd/x\n"),
            (second, "two\nd/y\n"),
            (paused, "two\nd/y\n"),
        ):
            copy = await Sandbox.create(saved.name, pool=pool)  # by name as well as by id
            assert (await copy.run("cat f; ls d/*")).stdout == expected
            await copy.kill()
            await Sandbox.delete_snapshot(saved.id, pool=pool)
        with pytest.raises(NotFoundError):
            await Sandbox.create(first.id, pool=pool)

    aio.run(go())


def _disk_bytes(home) -> int:
    places = [home.images, home.layers, home.pages]
    files = [file for place in places for file in place.rglob("*") if file.is_file()]
    return sum(file.stat().st_blocks * 512 for file in files)


def test_second_snapshot_costs_only_what_changed(aio, home, pool, fresh):
    async def go() -> tuple[int, int]:
        script = (
            "import os, sys\nb = bytearray(os.urandom(100 << 20))\n"
            "for n in range(100): open(f'f{n}', 'wb').write(os.urandom(1 << 20))\n"
            "print('ready', flush=True)\n"
            "for line in sys.stdin:\n b[:2 << 20] = os.urandom(2 << 20)\n"
            " open('f0', 'wb').write(os.urandom(1 << 20))\n print('touched', flush=True)"
        )
        job = await fresh.start(["python3", "-c", script], stdin=True)
        assert await anext(job) == ("stdout", b"ready\n")
        await fresh.snapshot("big")
        first = _disk_bytes(home)
        await job.send(b"go\n")
        assert await anext(job) == ("stdout", b"touched\n")
        await fresh.snapshot("big again")
        second = _disk_bytes(home)
        await job.kill()
        return first, second

    first, second = aio.run(go())
    pool.delete_snapshot("big")
    pool.delete_snapshot("big again")
    assert first > 200 << 20
    assert second - first <= 8 << 20


def test_reported_failed_pause_leaves_the_sandbox_running(aio, home, fresh):
    """Two ways to fail: no folder for the image, and a file that cannot be saved."""

    async def go() -> None:
        os.rename(home.tmp, home.path / "tmp-away")
        (home.path / "tmp").write_text("in the way")
        try:
            with pytest.raises(StorageError, match="memory image"):
                await fresh.pause()
            assert (await fresh.run("echo alive")).stdout == "alive\n"
        finally:
            (home.path / "tmp").unlink()
            os.rename(home.path / "tmp-away", home.tmp)
        holder = await fresh.start("exec 3>gone; rm gone; echo held; sleep 1000")
        await anext(holder)
        with pytest.raises(ConflictError, match="runs on"):
            await fresh.pause()
        assert (await fresh.refresh()).state == State.RUNNING
        assert (await fresh.run("echo alive")).stdout == "alive\n"
        await holder.kill()
        await fresh.pause()

    aio.run(go())


def test_commit_that_fails_after_the_checkpoint_goes_on_from_memory(aio, home, fresh):
    async def go() -> None:
        await fresh.run("echo kept > f")
        os.rename(home.images, home.path / "images-away")
        try:
            with pytest.raises(StorageError, match="could not save"):
                await fresh.pause()
        finally:
            os.rename(home.path / "images-away", home.images)
        assert (await fresh.run("cat f")).stdout == "kept\n"
        await fresh.pause()
        await fresh.resume()
        assert (await fresh.run("cat f")).stdout == "kept\n"

    aio.run(go())


def test_reported_damaged_image_is_a_clean_error_and_deletable(aio, home, pool, fresh):
    async def go() -> None:
        await fresh.run("echo one > f")
        await fresh.pause()
        record = BoxRecord.load(BoxRecord.path(home, fresh.id))
        image = home.images / record.image / "pages.img"
        with open(image, "r+b") as handle:
            handle.seek(image.stat().st_size // 2)
            handle.write(b"\xff" * 8192)
        with pytest.raises(CheckpointError, match="damaged"):
            await fresh.resume()
        assert (await fresh.refresh()).state == State.PAUSED
        assert await fresh.kill()
        assert not await fresh.kill()
        with pytest.raises(NotFoundError):
            await Sandbox.connect(fresh.id, pool=pool)

    aio.run(go())


def test_reported_previous_generation_stays_until_the_new_one_answered(aio, home, pool, fresh):
    async def go() -> None:
        await fresh.run("echo one > f")
        await fresh.pause()
        first = BoxRecord.load(BoxRecord.path(home, fresh.id)).image
        await fresh.resume()
        await fresh.run("echo two > f")
        await fresh.pause()
        record = BoxRecord.load(BoxRecord.path(home, fresh.id))
        assert record.previous == first
        (home.images / record.image / "pages.img").write_bytes(b"")
        with pytest.raises(CheckpointError):
            await fresh.resume()
        assert (home.images / first).exists()
        await (await pool.resume(fresh.id, previous=True)).close()
        assert (await fresh.run("cat f")).stdout == "one\n"

    aio.run(go())


def test_image_of_another_build_is_refused_by_name(aio, home, fresh):
    async def go() -> None:
        await fresh.pause()
        record = BoxRecord.load(BoxRecord.path(home, fresh.id))
        path = ImageManifest.path(home, record.image)
        manifest = ImageManifest.load(path)
        real, manifest.engine = manifest.engine, "0.0~20990101.0"
        manifest.save(path)
        with pytest.raises(CheckpointError, match="20990101"):
            await fresh.resume()
        manifest.engine = real
        manifest.save(path)
        await fresh.resume()
        assert (await fresh.run("echo back")).stdout == "back\n"

    aio.run(go())


def test_reported_calls_while_pausing_get_a_reason(aio, fresh):
    async def go() -> None:
        await fresh.run("head -c 60000000 /dev/urandom > blob")
        pausing = asyncio.create_task(fresh.pool.pause(fresh.id))
        outcomes = []
        refused = False
        while not pausing.done() or not refused:
            try:
                outcomes.append((await fresh.run("echo yes")).stdout)
            except ConflictError as error:
                outcomes.append(str(error))
                refused = True
            await asyncio.sleep(0.001)
        await pausing
        assert all(
            any(word in text for word in ("yes", "paus", "not running", "hung up"))
            for text in outcomes
        )
        with pytest.raises(ConflictError, match="paused already"):
            await fresh.pool.pause(fresh.id)
        with pytest.raises(ConflictError, match="not running"):
            await fresh.run("true")
        await fresh.resume()
        with pytest.raises(ConflictError, match="runs already"):
            await fresh.resume()

    aio.run(go())


def test_killing_at_any_moment_of_a_pause_leaves_nothing(aio, home, pool):
    async def go() -> None:
        for wait in (0.0, 0.05, 0.1, 0.2):
            box = await Sandbox.create(pool=pool)
            await box.run("head -c 20000000 /dev/urandom > blob")
            pausing = asyncio.ensure_future(pool.pause(box.id))
            await asyncio.sleep(wait)
            assert await pool.kill(box.id)
            await asyncio.gather(pausing, return_exceptions=True)
            assert not home.box(box.id).exists()
            assert not await pool.kill(box.id)

    before = {place.name for place in home.images.iterdir()}
    aio.run(go())
    assert settled(home) == TIDY
    gc.collect(home)
    assert {place.name for place in home.images.iterdir()} <= before


def test_what_clients_do_during_a_checkpoint_waits_for_its_end(aio, fresh):
    """A frame that reached the silent agent would wake it up while it is being saved."""

    async def go() -> None:
        await fresh.run("head -c 30000000 /dev/urandom > blob")
        echo = await fresh.start("while read x; do echo got $x; done", stdin=True)
        left = await fresh.start("sleep 7654")
        saving = asyncio.create_task(fresh.pool.snapshot(fresh.id))
        sent = 0
        while not saving.done():
            await echo.send(f"{sent}\n".encode())
            sent += 1
            if sent == 5:
                left.let_go()
            await asyncio.sleep(0.005)
        await saving
        echo.close_stdin()
        assert (await echo.wait()).stdout == "".join(f"got {n}\n" for n in range(sent))
        for _ in range(100):
            if not (survivors := (await fresh.run("pgrep -f '[s]leep 7654'")).stdout):
                break
        assert survivors == ""
        fresh.pool.delete_snapshot(saving.result().id)

    aio.run(go())


def test_two_that_resume_at_once_both_get_it(aio, pool, fresh):
    async def go() -> None:
        await fresh.pause()
        pools = [pool, Pool(pool.home)]
        both = await asyncio.gather(*(Sandbox.connect(fresh.id, pool=each) for each in pools))
        assert [(await box.run("echo hi")).stdout for box in both] == ["hi\n"] * 2
        await pools[1].close()

    aio.run(go())


def test_reported_fork_while_writing_is_consistent(aio, fresh):
    async def go() -> None:
        script = (
            "import os\nn = 0\nwhile True:\n n += 1\n"
            " open('a.tmp', 'w').write('%d %d' % (n, -n)); os.rename('a.tmp', 'a')"
        )
        writer = await fresh.start(["python3", "-c", script])
        await fresh.run("until [ -e a ]; do sleep 0.01; done")
        copies = await fresh.fork(2)
        for copy in copies:
            first, second = (await copy.files.read_text("a")).split()
            assert int(first) == -int(second)
            assert await copy.kill()
        await writer.kill()

    aio.run(go())


def test_command_time_limit_does_not_run_while_paused(aio, fresh):
    async def outlives(limit: float) -> bool | None:
        """A pause longer than its limit; None when it had run for that long without the pause."""
        began = time.monotonic()
        job = await fresh.start("sleep 1000", timeout=limit, detach=True, tag=f"t{limit}")
        job.let_go()
        await fresh.pause()
        await asyncio.sleep(limit + 0.5)
        await fresh.resume()
        running = {row["tag"] for row in await fresh.processes() if row.get("running")}
        used = time.monotonic() - began - limit - 0.5
        assert (await (await fresh.attach(tag=f"t{limit}")).wait()).timed_out
        return None if used >= limit else f"t{limit}" in running

    async def go() -> bool | None:
        for limit in (2.0, 8.0, 30.0):  # a machine with much else to do needs the longer ones
            if (found := await outlives(limit)) is not None:
                return found
        raise AssertionError("this machine cannot pause and resume within 30 s")

    assert aio.run(go())


def test_long_chains_of_layers_are_merged_while_running(aio, home, gvisor):
    async def go() -> None:
        pool = Pool(home, max_layers=3)
        box = await Sandbox.create(pool=pool, timeout=1200)
        await box.run("rm /etc/hosts", user="root")
        for cycle in range(7):
            await box.run(
                f"mkdir -p d{cycle}; echo {cycle} > d{cycle}/f; rm -rf d{cycle - 2}; "
                f"echo {cycle} >> log"
            )
            await box.pause()
            await box.resume()
            record = pool.record(box.id)
            while len(ImageManifest.load(ImageManifest.path(home, record.image)).layers) > 3:
                await asyncio.sleep(0.02)
                record = pool.record(box.id)
        listing = (await box.run("cat d*/f log; ls; ls /etc/hosts")).stdout
        assert listing == "5\n6\n0\n1\n2\n3\n4\n5\n6\nd5\nd6\nlog\n"
        await box.kill()
        await pool.close()

    aio.run(go())


def test_wrong_arguments_are_named(aio, pool):
    with pytest.raises(InputError, match="on_timeout"):
        aio.run(Sandbox.create(pool=pool, on_timeout="stop"))
    with pytest.raises(InputError, match="gvisor"):
        aio.run(Sandbox.create(pool=pool, backend="gvisr"))
    with pytest.raises(NotFoundError, match="no sandbox 0123456789"):
        aio.run(Sandbox.connect("0123456789", pool=pool))
    with pytest.raises(InputError, match="at least 1"):
        aio.run(pool.fork("0123456789", 0, {}))
    with pytest.raises(NotFoundError, match="there are"):
        aio.run(Sandbox.create("no-such-template", pool=pool))
    with pytest.raises(NotFoundError):
        aio.run(Sandbox.connect("../../etc", pool=pool))
