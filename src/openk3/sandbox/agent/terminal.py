"""The size of a command's terminal, and changing it while programs use it."""

import fcntl
import os
import signal
import struct
import termios
from collections.abc import Callable
from typing import TYPE_CHECKING

from openk3.sandbox.agent.loop import Loop
from openk3.sandbox.agent.tracker import send_signal

if TYPE_CHECKING:
    from openk3.sandbox.agent.job import Output

Size = tuple[int, int]
LOOK_AGAIN_S = (0.01, 0.04, 0.16, 0.64, 2.56, 10.24)


def set_size(fd: int, size: Size) -> None:
    """(rows, columns) of a terminal. Raises ValueError for numbers that are no size."""
    if len(size) != 2 or not all(
        isinstance(number, int) and 0 < number < 1 << 16 for number in size
    ):
        raise ValueError(f"a terminal of {size!r} rows and columns")
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


def get_size(fd: int) -> Size:
    """(rows, columns) of a terminal."""
    rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8)))
    return rows, columns


class Terminal:
    """The terminal of one command; `members` lists the processes of the command.

    A line editor that prepares a prompt reads the size and writes it back. A new size that arrives
    between the two is overwritten with the old one, and no event tells of it: so every change is
    looked at again for a while, and made again when the terminal is back at a size it had before.
    """

    def __init__(
        self, loop: Loop, master: "Output", leader: int, members: Callable[[], list[int]]
    ) -> None:
        self.loop, self.master = loop, master
        self.leader, self.members = leader, members
        self._change = 0
        self._before: set[Size] = set()

    def resize(self, size: Size) -> None:
        """A new size, told to the programs in the terminal."""
        if not self.master.open:
            return
        current = get_size(self.master.fd)
        if size == current and not self._before:
            return
        self._before = (self._before | {current}) - {size}
        self._change += 1
        self._apply(size)
        self._look_again(self._change, size, LOOK_AGAIN_S)

    def _apply(self, size: Size) -> None:
        set_size(self.master.fd, size)
        if not _kernel_tells(self.master.fd):
            send_signal(self._session(), signal.SIGWINCH)

    def _look_again(self, change: int, size: Size, waits: tuple[float, ...]) -> None:
        """After each of `waits`, until the terminal is closed or has been resized again."""

        def look() -> None:
            if not self.master.open or change != self._change:
                return
            if get_size(self.master.fd) in self._before:
                self._apply(size)
            self._look_again(change, size, waits[1:])

        if waits:
            self.loop.after(waits[0], look)
        else:
            self._before = set()

    def _session(self) -> list[int]:
        """Processes that have this terminal, and not the servers that left it."""
        found = []
        for pid in self.members():
            try:
                if os.getsid(pid) == self.leader:
                    found.append(pid)
            except ProcessLookupError:
                continue  # it ended while we looked
        return found


def _kernel_tells(fd: int) -> bool:
    """Linux signals the foreground processes itself; gVisor does not, nor says which they are."""
    try:
        os.tcgetpgrp(fd)
    except OSError:
        return False
    return True
