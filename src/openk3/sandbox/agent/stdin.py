"""Bytes on their way to the standard input of one command."""

import os
import select
from collections import deque

from openk3.sandbox import frames
from openk3.sandbox.agent.loop import Channel, Loop

END_OF_FILE = b"\x04"  # what a terminal takes for it


class Stdin:
    """The writing end: takes what the command has room for, and the rest when it has."""

    def __init__(self, loop: Loop, fd: int, terminal: bool) -> None:
        self.loop, self.fd, self.terminal = loop, fd, terminal
        self.open = True
        self._pending = bytearray()
        self._owed: deque[tuple[Channel, int]] = deque()  # who fed how much of it, in order
        self._eof = False

    def feed(self, channel: Channel, piece: bytes) -> None:
        """Bytes of a caller, granted back to it once written, or once nobody will read them."""
        if not self.open:
            channel.grant(len(piece))
            return
        self._pending += piece
        self._owed.append((channel, len(piece)))
        self._push()

    def end(self) -> None:
        """No more will come: the command reads end of file after what was fed."""
        self._eof = True
        if self.terminal and self.open:
            self._pending += END_OF_FILE
        self._push()

    def close(self) -> None:
        """Nobody reads any more."""
        if self.open:
            self.open = False
            self.loop.unwatch(self.fd)
            os.close(self.fd)
            self._pending.clear()
            self._grant(sum(count for _, count in self._owed))

    def _push(self) -> None:
        if not self.open:
            return
        written = 0
        try:
            while self._pending:
                count = os.write(self.fd, self._pending[: frames.PIECE])
                del self._pending[:count]
                written += count
        except BlockingIOError:
            self.loop.watch(self.fd, self._push, select.POLLOUT)
        except OSError:  # the command closed its input
            self.close()
            return
        else:
            self.loop.unwatch(self.fd)
            if self._eof and not self.terminal:
                self.close()
        self._grant(written)

    def _grant(self, num_bytes: int) -> None:
        while num_bytes > 0 and self._owed:
            channel, count = self._owed.popleft()
            paid = min(count, num_bytes)
            num_bytes -= paid
            if paid < count:
                self._owed.appendleft((channel, count - paid))
            if self.loop.channels.get(channel.number) is channel:
                channel.grant(paid)
