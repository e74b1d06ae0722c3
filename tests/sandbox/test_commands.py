"""Commands in a gVisor sandbox. Each test that says "reported" is a fault of another system."""

import asyncio
import hashlib
import resource
import signal

import pytest

from openk3.errors import InputError, NotFoundError
from openk3.sandbox import Sandbox


@pytest.fixture(scope="module")
def box(either):
    return either


def test_streams_exit_code_user_and_environment(aio, box):
    result = aio.run(box.run("echo out; echo err >&2; exit 3", env={"A": "ü"}))
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
    result = aio.run(box.run('echo "$A $(id -u) $PWD $K3_SANDBOX_ID"', env={"A": "ü"}))
    assert result.stdout == f"ü 1000 /home/user {box.id}\n"
    assert aio.run(box.run(["id", "-u"], user="root")).stdout == "0\n"
    assert aio.run(box.run(["printf", "%s", "a b;c"])).stdout == "a b;c"


def test_bad_commands_are_input_errors(aio, box):
    with pytest.raises(InputError, match="no-such-program"):
        aio.run(box.run(["no-such-program"]))
    with pytest.raises(InputError, match="nobody-here"):
        aio.run(box.run("true", user="nobody-here"))
    with pytest.raises(InputError):
        aio.run(box.run([]))
    with pytest.raises(NotFoundError, match="no command"):
        aio.run(box.attach(pid=99999))


def test_death_by_signal_reads_like_a_shell(aio, box):
    assert aio.run(box.run("kill -9 $$")).exit_code == 128 + 9


def test_standard_input_of_any_size_reaches_the_command(aio, box):
    data = bytes(range(256)) * 8000
    result = aio.run(box.run(["sha256sum"], input=data))
    assert result.stdout.split()[0] == hashlib.sha256(data).hexdigest()


def test_reported_timeout_kills_the_whole_family(aio, box):
    """A grandchild that holds the pipe, or left the session, must not outlive the limit."""
    script = "(sleep 4321 &) ; setsid sleep 4321 & sh -c 'trap \"\" TERM; sleep 4321' ; wait"
    result = aio.run(box.run(script, timeout=1.0))
    assert result.timed_out
    assert result.exit_code == 137
    assert "4321" not in aio.run(box.run("ps ax -o args | grep [4]321", user="root")).stdout


def test_reported_grandchild_with_the_pipe_does_not_delay_the_answer(aio, box):
    result = aio.run(asyncio.wait_for(box.run("echo hi; sleep 5432 &"), 60))
    assert (result.stdout, result.exit_code) == ("hi\n", 0)
    survivors = aio.run(box.run("pgrep -f '[s]leep 5432'")).stdout.split()
    assert len(survivors) == 1  # a server started in the background lives on
    aio.run(box.run(f"kill {survivors[0]}"))


def test_reported_cancelling_a_run_cleans_up_inside(aio, box):
    async def cancel() -> str:
        started = asyncio.Event()
        task = asyncio.create_task(
            box.run("echo x; sleep 6543 & sleep 6543", on_stdout=lambda _: started.set())
        )
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            if not (left := (await box.run("pgrep -f '[s]leep 6543'")).stdout):
                break
        return left

    assert aio.run(cancel()) == ""


def test_reported_big_output_is_byte_exact_and_host_memory_bounded(aio, box):
    size = 50_000_000
    script = (
        "import sys, hashlib; b = bytes(range(256)) * 4096; h = hashlib.sha256()\n"
        f"n = {size}\n"
        "while n:\n p = b[:n]; h.update(p); sys.stdout.buffer.write(p); n -= len(p)\n"
        "sys.stderr.write(h.hexdigest())"
    )
    digest, seen = hashlib.sha256(), 0

    def take(piece: bytes) -> None:
        nonlocal seen
        digest.update(piece)
        seen += len(piece)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = box.run(["python3", "-c", script], on_stdout=take, max_output=1 << 20)
    result = aio.run(run)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert (seen, digest.hexdigest()) == (size, result.stderr)
    assert result.truncated
    assert f"{size - (1 << 20)} bytes dropped" in result.stdout
    assert len(result.stdout_bytes) < (1 << 20) + 100
    assert grown_mb < 30


def test_reported_slow_reader_blocks_only_its_own_command(aio, box):
    async def go() -> tuple[str, int]:
        slow = await box.start("yes", detach=False)
        answer = (await box.run("echo quick")).stdout
        await slow.kill()
        return answer, (await slow.wait()).exit_code

    assert aio.run(go()) == ("quick\n", 137)


def test_reported_stuck_command_does_not_block_the_sandbox(aio, box):
    async def go() -> str:
        stuck = await box.start("trap '' TERM INT HUP; echo ready; kill -STOP $$")
        await anext(aiter(stuck))
        await stuck.signal(signal.SIGTERM)
        answer = (await box.run("echo next")).stdout
        assert await stuck.kill()
        assert (await stuck.wait()).exit_code == 137
        assert not await stuck.kill()
        return answer

    assert aio.run(go()) == "next\n"


def test_output_limit_ends_the_command_with_a_reason(aio, box):
    result = aio.run(box.run("yes", output_limit=1_000_000, max_output=1000))
    assert result.reason == "output_limit"
    assert result.truncated
    assert result.exit_code == 137


def test_detached_command_is_found_again_by_tag_with_what_nobody_heard(aio, box):
    script = """
        until [ -e go ]; do sleep 0.01; done
        for i in 1 2 3; do echo $i; done; touch said; read x; echo got $x; exit 7
    """

    async def go() -> tuple[str, int]:
        job = await box.start(script, detach=True, tag="server", stdin=True)
        job.let_go()
        listed = [row for row in await box.processes() if row["tag"] == "server"]
        assert listed[0]["pid"] == job.pid
        await box.run("touch go; until [ -e said ]; do sleep 0.01; done")
        again = await box.attach(tag="server")
        await again.send(b"word\n")
        result = await again.wait()
        return result.stdout, result.exit_code

    assert aio.run(go()) == ("1\n2\n3\ngot word\n", 7)


def test_terminal_with_size_and_resize(aio, box):
    async def go() -> str:
        job = await box.start("stty size; read x; stty size", tty=(33, 101))
        seen = b""
        async for _, piece in job:
            seen += piece
            if seen.endswith(b"33 101\r\n"):
                await job.resize(44, 55)
                await job.send(b"\n")
        return seen.decode()

    assert "33 101\r\n" in (text := aio.run(go()))
    assert text.endswith("44 55\r\n")


WRITE_BACK = """
import sys, termios
old = termios.tcgetwinsize(0)
print("read", flush=True)
sys.stdin.readline()
termios.tcsetwinsize(0, old)
while termios.tcgetwinsize(0) == old:
    pass
print(*termios.tcgetwinsize(0))
"""


def test_new_size_outlives_a_line_editor_that_writes_the_old_one_back(aio, box):
    """Which GNU readline does with every prompt: a size that arrived in between was lost."""

    async def go() -> bytes:
        job = await box.start(["python3", "-c", WRITE_BACK], tty=(33, 101), timeout=60)
        seen = b""
        async for _, piece in job:
            seen += piece
            if seen == b"read\r\n":
                await job.resize(44, 55)
                await job.send(b"\n")
        return seen

    assert aio.run(go()).endswith(b"44 55\r\n")


def test_programs_in_the_terminal_are_told_of_its_new_size(aio, box):
    server = "trap 'echo told wrongly' WINCH; echo ready; until [ -e told ]; do sleep 0.01; done"
    script = f"trap 'stty size' WINCH; setsid sh -c \"{server}\" & until wait $!; do :; done"

    async def go() -> str:
        job = await box.start(["sh", "-c", script], tty=(33, 101), timeout=60)
        seen = b""
        async for _, piece in job:
            seen += piece
            if seen == b"ready\r\n":
                await job.resize(44, 55)
            if b"44 55" in seen:
                await box.run("touch told")
        return seen.decode()

    assert aio.run(go()) == "ready\r\n44 55\r\n"


def test_nonsense_for_the_agent_is_an_error_and_not_its_end(aio, box):
    async def go() -> None:
        for size in ((0, 80), (24, 70_000), (-1, 80)):
            with pytest.raises(InputError, match="tty"):
                await box.start("true", tty=size)
        job = await box.start("sleep 1000", tty=(24, 80))
        with pytest.raises(InputError, match="70000"):
            await job.resize(24, 70_000)
        with pytest.raises(InputError, match="999"):
            await job.signal(999)
        with pytest.raises(InputError, match="did you mean 'timeout'"):
            await box.run("true", time_out=3)
        assert await job.kill()
        assert (await box.run("echo here")).stdout == "here\n"

    aio.run(go())


def test_a_filter_that_writes_while_it_reads_gets_all_of_its_input(aio, box):
    data = bytes(range(256)) * 20_000
    result = aio.run(box.run(["cat"], input=data))
    assert hashlib.sha256(result.stdout_bytes).digest() == hashlib.sha256(data).digest()


def test_input_that_nobody_reads_holds_up_nobody(aio, box):
    """A command that closed its input, and one that ends before it has read it."""
    data = b"x" * 5_000_000
    assert aio.run(box.run("exec <&-; sleep 0.1; echo closed", input=data)).stdout == "closed\n"
    assert aio.run(box.run("true", input=data)).exit_code == 0

    async def two_callers() -> None:
        job = await box.start("exec <&-; echo closed; sleep 1000", stdin=True)
        await anext(job)
        connection = await box.connected()
        call = connection.open("stdin", job=job.job)
        await call.send(data)
        call.send_eof()
        await call.result()
        await job.send(data)
        await job.kill()

    aio.run(two_callers())


def test_many_commands_at_once_keep_their_outputs_apart(aio, box):
    async def go() -> list[str]:
        runs = [box.run(f"for i in 1 2 3 4 5; do echo {n}; done") for n in range(12)]
        return [result.stdout for result in await asyncio.gather(*runs)]

    assert aio.run(go()) == [f"{n}\n" * 5 for n in range(12)]


def test_python_of_the_template_has_its_standard_library(aio, box: Sandbox):
    script = "import ssl, sqlite3, zlib, lzma, ctypes, asyncio; print(sqlite3.connect(':memory:'))"
    result = aio.run(box.run(["python3", "-c", script]))
    assert result.exit_code == 0, result.stderr
