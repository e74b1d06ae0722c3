"""`k3 sandbox shell` and the terminal it runs in: sizes, pasted text, the end."""

import asyncio
import os
import signal
import termios
from collections.abc import Iterator

import pytest

from openk3.cli.terminal import Terminal

LIMIT_S = 60.0


class FakeJob:
    """A command that prints what the test puts into `output`."""

    def __init__(self) -> None:
        self.output: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.sizes: list[tuple[int, int]] = []
        self.typed = bytearray()
        self.gate = asyncio.Event()
        self.gate.set()
        self.changed = asyncio.Event()
        self.ended = {"exit_code": 7}

    def __aiter__(self) -> "FakeJob":
        return self

    async def __anext__(self) -> tuple[str, bytes]:
        piece = await self.output.get()
        if piece is None:
            raise StopAsyncIteration
        return "stdout", piece

    async def resize(self, rows: int, cols: int) -> None:
        await self.gate.wait()
        self.sizes.append((rows, cols))
        self.changed.set()

    async def send(self, data: bytes) -> None:
        await self.gate.wait()
        self.typed += data
        self.changed.set()


class FakeBox:
    def __init__(self, while_starting=lambda: None) -> None:
        self.job = FakeJob()
        self.while_starting = while_starting

    async def start(self, cmd: list[str], *, tty: tuple[int, int]) -> FakeJob:
        self.job.sizes.append(tty)
        self.job.changed.set()
        self.while_starting()
        return self.job


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (33, 101))
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def _resize(theirs: int, size: tuple[int, int]) -> None:
    termios.tcsetwinsize(theirs, size)
    os.kill(os.getpid(), signal.SIGWINCH)


async def _until(job: FakeJob, told) -> None:
    while not told():
        job.changed.clear()
        await job.changed.wait()


def _run(box: FakeBox, theirs: int, script) -> int:
    async def go() -> int:
        async with asyncio.timeout(LIMIT_S):
            shell = asyncio.ensure_future(Terminal(theirs, theirs).shell(box))
            await script(box.job)
            box.job.output.put_nowait(None)
            return await shell

    return asyncio.run(go())


def test_a_size_that_changes_while_the_shell_starts_arrives(ends):
    _, theirs = ends
    box = FakeBox(lambda: _resize(theirs, (44, 55)))

    async def script(job: FakeJob) -> None:
        await _until(job, lambda: job.sizes == [(33, 101), (44, 55)])

    assert _run(box, theirs, script) == 7


def test_the_newest_of_many_sizes_is_the_last_to_arrive(ends):
    _, theirs = ends

    async def script(job: FakeJob) -> None:
        await _until(job, lambda: job.sizes)
        job.gate.clear()
        for rows in range(40, 50):
            _resize(theirs, (rows, 80))
            await asyncio.sleep(0)
        job.gate.set()
        await _until(job, lambda: job.sizes[-1] == (49, 80))

    _run(FakeBox(), theirs, script)


def test_pasted_text_arrives_in_order_and_the_terminal_is_as_before(ends):
    ours, theirs = ends
    before = termios.tcgetattr(theirs)
    text = b"".join(b"%d " % n for n in range(20_000))

    async def script(job: FakeJob) -> None:
        for at in range(0, len(text), 1000):
            sent = at + os.write(ours, text[at : at + 1000])
            await _until(job, lambda sent=sent: len(job.typed) == sent)
        assert bytes(job.typed) == text

    _run(FakeBox(), theirs, script)
    assert termios.tcgetattr(theirs) == before


def test_a_terminal_that_is_closed_ends_the_shell():
    ours, theirs = os.openpty()
    box = FakeBox()

    async def go() -> int:
        async with asyncio.timeout(LIMIT_S):
            shell = asyncio.ensure_future(Terminal(theirs, theirs).shell(box))
            await _until(box.job, lambda: box.job.sizes)
            os.close(ours)
            return await shell

    assert asyncio.run(go()) == 128 + signal.SIGHUP
    os.close(theirs)
