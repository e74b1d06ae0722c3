"""Untrusted code: bombs end their own sandbox at most, and nothing of the host is in reach."""

import asyncio
import os
import signal
from contextlib import suppress

import pytest

from openk3.errors import BackendError, InputError, OpenK3Error
from openk3.sandbox import Limits, Network, Sandbox, State, events, recovery
from openk3.sandbox.keeper import cgroups

FORK_BOMB = "bomb() { bomb | bomb & }; bomb; sleep 1000"
MEMORY_BOMB = "b = []\nwhile True: b.append(bytearray(b'x' * (8 << 20)))"


async def _answers(box: Sandbox) -> bool:
    result = await asyncio.wait_for(box.run("echo still here"), 30)
    return result.stdout == "still here\n"


def test_reported_fork_bomb_leaves_others_and_the_host_alone(aio, pool, box):
    async def go() -> None:
        victim = await Sandbox.create(pool=pool, limits=Limits(cpus=0.5, processes=64))
        bomb = await victim.start(FORK_BOMB)
        before = len(os.listdir("/proc"))
        for _ in range(3):
            assert await _answers(box)
        assert len(os.listdir("/proc")) - before < 400
        bomb.let_go()
        assert await victim.kill()
        assert await _answers(box)

    aio.run(go())


def test_memory_bomb_ends_at_most_its_own_sandbox_and_is_told(aio, home, pool, box):
    """The kernel kills the greedy process, or the whole machine when it judges otherwise."""

    async def go() -> None:
        victim = await Sandbox.create(pool=pool, limits=Limits(memory_mb=200))
        if not victim.info.capabilities.memory_limit:
            await victim.kill()
            pytest.skip("no memory cgroup on this machine")
        try:
            result = await victim.run(["python3", "-c", MEMORY_BOMB])
            assert result.exit_code != 0
        except OpenK3Error:
            assert (await victim.refresh()).reason == "oom"
        assert await _answers(box)
        while not {"oom_kill", "crashed"} & {e["event"] for e in events.read(home, victim.id)}:
            await asyncio.sleep(0.05)
        assert await victim.kill()

    aio.run(go())


def test_machine_that_dies_falls_back_to_its_last_generation(aio, home, pool):
    async def go() -> None:
        victim = await Sandbox.create(pool=pool)
        groups = cgroups.groups_named(recovery.group_name(home, victim.id))
        if not groups:
            await victim.kill()
            pytest.skip("no cgroups on this machine to find the machine's processes by")
        await victim.run("echo kept > f")
        await victim.snapshot()  # the machine that runs on from it is watched like the first
        await victim.run("echo lost > f")
        for pid in cgroups.processes_in(groups[0]):
            with suppress(ProcessLookupError):  # the death of one ends the others
                os.kill(pid, signal.SIGKILL)
        while (info := await victim.refresh()).state == State.RUNNING:
            await asyncio.sleep(0.05)
        assert info.state == State.PAUSED
        assert "ended" in str(info.reason)
        await victim.resume()
        assert (await victim.run("cat f")).stdout == "kept\n"
        await victim.kill()
        for saved in pool.snapshots():
            pool.delete_snapshot(saved.id)

    aio.run(go())


def test_host_files_processes_network_and_manager_are_out_of_reach(aio, home, box, tmp_path):
    (tmp_path / "key").write_text("k3-secret-key")
    script = f"""
        cat {tmp_path}/key; ls {home.path}; ls /work /root/.pyenv; cat /proc/1/environ; echo
        find / -xdev -name key -o -xdev -name '*.sock' 2>/dev/null | grep -v ^/proc
        ls /proc | grep -c '^[0-9]'; ls /sys/class/net; cat /proc/mounts | grep -v '^none'
        for host in 127.0.0.1 192.0.2.1; do
            python3 -c "import socket; socket.create_connection(('$host', 80), timeout=2)"
        done
    """
    result = aio.run(box.run(script, user="root", timeout=60))
    assert "k3-secret-key" not in result.stdout
    assert str(home.path) not in result.stdout
    assert "eth0" not in result.stdout
    assert result.stderr.count("Error") >= 2  # both connections were refused
    pids = [int(line) for line in result.stdout.split() if line.isdigit()]
    assert pids
    assert max(pids) < 20
    assert os.uname().release not in aio.run(box.run("uname -r")).stdout


def test_the_agent_survives_signals_from_the_user(aio, box):
    aio.run(box.run("kill -9 1; kill -STOP 1; kill -TERM -1"))
    assert aio.run(_answers(box))


def test_a_user_that_kills_the_agent_ends_only_its_own_sandbox(aio, pool, box):
    async def go() -> None:
        victim = await Sandbox.create(pool=pool)
        with pytest.raises(OpenK3Error):
            await victim.run(
                "python3 -c 'import ctypes, os; "
                'fd = os.open("/proc/1/mem", os.O_RDWR)\' ; mount -t tmpfs x /.k3; '
                "python3 -c 'import os, signal; os.kill(1, signal.SIGSEGV)'; "
                "kill -ABRT 1; kill -BUS 1; echo b > /proc/sysrq-trigger; sleep 60",
                user="root",
                timeout=3,
            ) or victim.files.read("/definitely/not")
        assert await _answers(box)
        await victim.kill()

    aio.run(go())


def test_no_network_is_offered_and_asking_for_it_is_an_error(aio, pool):
    for network in (Network(internet=True), Network(allow_out=("10.0.0.0/8",))):
        with pytest.raises(BackendError, match="no network"):
            aio.run(Sandbox.create(pool=pool, network=network))


def test_limits_are_checked(aio, pool):
    with pytest.raises(InputError, match="memory_mb"):
        Limits(memory_mb=-1)
    with pytest.raises(InputError, match="did you mean 'memory_mb'"):
        Limits.from_dict({"memory_m": 5})
