"""The agent's event loop: poll, timers, and channels with flow control over two pipes."""

import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from openk3.sandbox import frames


class Channel:
    """One open call. `credit` is how many more DATA bytes the caller is ready for."""

    def __init__(self, loop: "Loop", number: int) -> None:
        self.loop = loop
        self.number = number
        self.credit = frames.WINDOW
        self.on_data: Callable[[bytes], None] | None = None
        self.on_eof: Callable[[], None] | None = None
        self.on_credit: Callable[[], None] | None = None
        self.on_cancel: Callable[[], None] | None = None

    def event(self, value: Any) -> None:
        self.loop.send(frames.pack_json(self.number, frames.EVENT, value))

    def data(self, stream: int, piece: bytes) -> None:
        self.credit -= len(piece)
        self.loop.send(frames.pack(self.number, frames.DATA, bytes([stream]) + piece))

    def grant(self, num_bytes: int) -> None:
        """Tell the caller that `num_bytes` of its DATA were taken."""
        self.loop.send(frames.pack_credit(self.number, num_bytes))

    def end(self, value: Any = None) -> None:
        self._close(frames.pack_json(self.number, frames.END, value))

    def error(self, kind: str, message: str) -> None:
        value = {"kind": kind, "message": message}
        self._close(frames.pack_json(self.number, frames.ERROR, value))

    def _close(self, frame: bytes) -> None:
        if self.loop.channels.pop(self.number, None) is self:
            self.loop.send(frame)
        self.on_data = self.on_eof = self.on_credit = self.on_cancel = None


class Loop:
    """Reads frames from `fd_in`, writes frames to `fd_out`, calls back on fds, time and SIGCHLD."""

    def __init__(self, fd_in: int, fd_out: int) -> None:
        self.fd_in, self.fd_out = fd_in, fd_out
        self.channels: dict[int, Channel] = {}
        self.decoder = frames.Decoder()
        self.readers: dict[int, Callable[[], None]] = {}
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.poller = select.poll()
        self.poller.register(fd_in, select.POLLIN)
        self.on_child: Callable[[], None] = lambda: None
        self._wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.poller.register(self._wake_r, select.POLLIN)

    def send(self, frame: bytes) -> None:
        view = memoryview(frame)
        while view:
            view = view[os.write(self.fd_out, view) :]

    def watch(self, fd: int, callback: Callable[[], None], events: int = select.POLLIN) -> None:
        self.readers[fd] = callback
        self.poller.register(fd, events)

    def unwatch(self, fd: int) -> None:
        if self.readers.pop(fd, None):
            self.poller.unregister(fd)

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Call back at monotonic time `when`."""
        self.timers.append((when, callback))

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back once, in so many seconds."""
        self.at(time.monotonic() + seconds, callback)

    def shift_timers(self, seconds: float) -> None:
        """Time spent paused does not count against anybody's time limit."""
        self.timers = [(when + seconds, callback) for when, callback in self.timers]

    def read_frames(self) -> list[tuple[int, int, bytes]]:
        """Block for one piece of input. The keeper closing the pipe ends the sandbox."""
        piece = os.read(self.fd_in, 256 << 10)
        if not piece:
            os._exit(0)
        return self.decoder.feed(piece)

    def turn(self) -> list[tuple[int, int, bytes]]:
        """Wait for something to happen, run its callbacks, return the frames that arrived."""
        now = time.monotonic()
        wait = min((when for when, _ in self.timers), default=now + 3600) - now
        ready = dict(self.poller.poll(max(0, int(wait * 1000) + 1)))
        if ready.pop(self._wake_r, 0):
            os.read(self._wake_r, 4096)
            self.on_child()
        incoming = self.read_frames() if ready.pop(self.fd_in, 0) else []
        for fd in ready:
            if fd in self.readers:
                self.readers[fd]()
        now = time.monotonic()
        due = [callback for when, callback in self.timers if when <= now]
        self.timers = [timer for timer in self.timers if timer[0] > now]
        for callback in due:
            callback()
        return incoming
