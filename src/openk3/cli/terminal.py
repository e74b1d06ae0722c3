"""This terminal, connected to one inside a sandbox."""

import asyncio
import os
import signal
import termios
import tty
from contextlib import suppress

from openk3.sandbox import Process, Sandbox

PIECE = 4096
HANG_UP = 128 + signal.SIGHUP
SHELL = ["/bin/sh", "-c", "command -v bash >/dev/null && exec bash -l; exec sh -l"]


class Terminal:
    """A pair of descriptors of one terminal: `typed` is read from, `shown` written to."""

    def __init__(self, typed: int = 0, shown: int = 1) -> None:
        self.typed, self.shown = typed, shown
        self.loop = asyncio.get_running_loop()
        self._resized = asyncio.Event()

    def size(self) -> tuple[int, int]:
        """(rows, columns); of a terminal that does not know, the usual ones."""
        columns, rows = os.get_terminal_size(self.typed)
        return rows or 24, columns or 80

    async def shell(self, box: Sandbox) -> int:
        """A login shell in the sandbox until it ends; its exit code.

        A terminal that is closed ends it too: the exit code is that of a hang-up.
        """
        before = termios.tcgetattr(self.typed)
        self.loop.add_signal_handler(signal.SIGWINCH, self._resized.set)
        told = self.size()  # asked after the handler is there: no change falls between the two
        try:
            job = await box.start(SHELL, tty=told)
            tty.setraw(self.typed, termios.TCSADRAIN)  # what was typed meanwhile stays
            return await self._connect(job, told)
        finally:
            self.loop.remove_signal_handler(signal.SIGWINCH)
            with suppress(termios.error):  # it was closed
                termios.tcsetattr(self.typed, termios.TCSADRAIN, before)

    async def _connect(self, job: Process, told: tuple[int, int]) -> int:
        chore = asyncio.ensure_future(self._follow_size(job, told))
        typing = asyncio.ensure_future(self._send(job))
        showing = asyncio.ensure_future(self._show(job))
        try:
            await asyncio.wait({typing, showing}, return_when=asyncio.FIRST_COMPLETED)
            if showing.done() or typing.exception():  # what ended the shell ended the typing
                return await showing
            return HANG_UP
        finally:
            for task in (chore, typing, showing):
                task.cancel()
            await asyncio.gather(chore, typing, showing, return_exceptions=True)

    async def _follow_size(self, job: Process, told: tuple[int, int]) -> None:
        """One change after the other, so that the newest is the last to arrive."""
        while True:
            if (size := self.size()) != told:
                await job.resize(*size)
                told = size
                continue
            self._resized.clear()
            if self.size() == told:
                await self._resized.wait()

    async def _send(self, job: Process) -> None:
        """What is typed or pasted, in order, as fast as the shell takes it; until closed."""
        while piece := await self._next():
            await job.send(piece)

    async def _next(self) -> bytes:
        ready = self.loop.create_future()
        self.loop.add_reader(self.typed, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            self.loop.remove_reader(self.typed)
        try:
            return os.read(self.typed, PIECE)
        except OSError:  # how a terminal says that it was closed
            return b""

    async def _show(self, job: Process) -> int:
        async for _, piece in job:
            view = memoryview(piece)
            while view:  # a signal may cut a write short
                view = view[os.write(self.shown, view) :]
        return job.ended["exit_code"]
