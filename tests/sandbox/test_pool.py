"""A Pool's quotas, what it keeps ready, and the self-test it trusts."""

import asyncio

import pytest

from box_checks import TIDY, settled
from openk3.errors import BackendError, LimitError
from openk3.sandbox import Limits, Pool, Sandbox, events, recovery, stock
from openk3.sandbox import probe as probing
from openk3.sandbox.keeper import cgroups
from openk3.sandbox.store.home import Home
from openk3.sandbox.store.records import ImageManifest
from openk3.sandbox.templates import catalog


def test_no_more_than_max_running_also_when_asked_at_once(aio, home, gvisor):
    async def go() -> None:
        pool = Pool(home, max_running=2)
        asked = [Sandbox.create(pool=pool, timeout=600) for _ in range(4)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        made = [item for item in found if isinstance(item, Sandbox)]
        refused = [item for item in found if isinstance(item, LimitError)]
        assert (len(made), len(refused)) == (2, 2)
        assert "at most 2 may" in str(refused[0])
        with pytest.raises(LimitError):
            await made[0].fork(1)
        await made[0].pause()
        third = await Sandbox.create(pool=pool, timeout=600)
        with pytest.raises(LimitError):
            await made[0].resume()
        await third.kill()
        await made[0].resume()
        for box in made:
            await box.kill()
        await pool.close()

    aio.run(go())


def test_prewarmed_machine_is_taken_and_the_rest_ends_with_the_pool(aio, home, gvisor):
    async def go() -> None:
        pool = Pool(home, prewarm=1)
        first = await Sandbox.create(pool=pool, timeout=600)
        await asyncio.gather(*pool._chores)
        ((_, waiting, _),) = pool._ready.waiting
        second = await Sandbox.create(pool=pool, timeout=600, env={"A": "b"})
        assert second.id == waiting.id
        assert (await second.run("echo $A $K3_SANDBOX_ID")).stdout == f"b {second.id}\n"
        await asyncio.gather(*pool._chores)
        other = await Sandbox.create(pool=pool, timeout=600, user="root")  # of another kind
        assert other.id != pool._ready.waiting[0][1].id
        for box in (first, second, other):
            await box.kill()
        await pool.close()

    aio.run(go())
    assert settled(home) == TIDY


def test_warm_image_of_another_build_is_dropped_and_made_again(aio, home, pool):
    template = catalog.get(home, "python").id

    async def go() -> None:
        image = stock.warm_image(home, template)
        assert image
        path = ImageManifest.path(home, image)
        manifest = ImageManifest.load(path)
        manifest.engine = "0.0~20990101.0"
        manifest.save(path)
        box = await Sandbox.create(pool=pool, timeout=600)
        assert (await box.run("echo cold")).stdout == "cold\n"
        assert stock.warm_image(home, template) is None
        assert "warm_image_dropped" in [row["event"] for row in events.read(home)]
        await box.kill()
        assert await pool.warm() == template
        assert stock.warm_image(home, template) not in (None, image)

    aio.run(go())


def test_commands_and_processes_are_counted(aio, pool):
    async def go() -> None:
        box = await Sandbox.create(pool=pool, limits=Limits(commands=2, processes=16))
        jobs = [await box.start("sleep 1000") for _ in range(2)]
        with pytest.raises(LimitError, match="2 commands run already"):
            await box.start("true")
        await jobs[0].kill()
        await jobs[0].wait()
        bomb = "for i in $(seq 40); do sleep 1000 & done"
        done = await box.run(["sh", "-c", bomb], timeout=60)  # bash would try again for 15 s
        assert "fork" in done.stderr
        left = await box.run("pgrep -c sleep", user="root")
        assert int(left.stdout) <= 1 + 16  # what the other command itself is, and all of these
        await box.kill()

    aio.run(go())


def test_kernel_limits_are_those_that_were_asked_for(aio, home, pool):
    async def go() -> None:
        box = await Sandbox.create(pool=pool, limits=Limits(cpus=0.5, memory_mb=300))
        able = box.info.capabilities
        places = cgroups.groups_named(recovery.group_name(home, box.id))
        values = {
            file.name: file.read_text().split()
            for place in places
            for name in ("cpu.max", "cpu.cfs_quota_us", "memory.max", "memory.limit_in_bytes")
            if (file := place / name).exists()
        }
        await box.kill()
        if not (able.cpu_limit and able.memory_limit):
            pytest.skip("no cpu and memory cgroups on this machine")
        assert values.get("memory.max", values.get("memory.limit_in_bytes")) == [str(300 << 20)]
        assert values.get("cpu.max", values.get("cpu.cfs_quota_us"))[0] == "50000"

    aio.run(go())


def test_self_test_runs_once_for_one_machine_and_build(aio, tmp_path, gvisor, monkeypatch):
    ran: list[str] = []

    async def exercise(pool: Pool, backend: str) -> None:
        ran.append(backend)
        if len(ran) == 1:
            raise BackendError("the kernel forbids it")

    async def go() -> None:
        pool = Pool(Home(tmp_path / "home"))
        failed = await probing.probe(pool, "gvisor")
        assert (failed.ok, failed.reason) == (False, "the kernel forbids it")
        assert (await probing.probe(pool, "gvisor")).ok  # a failure is tried again
        assert (await probing.probe(pool, "gvisor")).ok
        assert len(ran) == 2
        monkeypatch.setattr(probing.engines, "cpu_fingerprint", lambda: "another processor")
        assert (await probing.probe(pool, "gvisor")).ok
        assert len(ran) == 3
        assert (await probing.probe(pool, "gvisor", fresh=True)).ok
        assert len(ran) == 4
        monkeypatch.setenv("OPENK3_RUNSC", "/nowhere/runsc")
        missing = await probing.probe(pool, "gvisor")
        assert not missing.ok
        assert "k3 sandbox setup" in missing.reason
        assert len(ran) == 4

    monkeypatch.setattr(probing, "_exercise", exercise)
    aio.run(go())
