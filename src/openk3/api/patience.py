"""How long a connection may take to say what it wants, and to read what it was told (uvicorn itself
waits for ever).

Callers that begin a request line and never end its headers, that connect and say nothing, or that
never read an answer, would hold a connection each until no file handle is left for anybody.
"""

import resource
from typing import Any

HEADERS_S = 30.0
MAX_FILES = 1 << 16
ACCEPTS = 128
"""Connections that are accepted before any of them is looked at; three such lots may be open until
the first of them is closed."""
OWN_FILES = 3 * ACCEPTS + 32
"""Handles that callers leave: where they took the last one, asyncio logs thousands of tracebacks a
second, and nobody is told anything."""
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: 0\r\n\r\n"
)
LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def impatient(
    protocol: type[Any], limit_s: float = HEADERS_S, max_callers: int = MAX_FILES
) -> type[Any]:
    """uvicorn's protocol for HTTP, or a class like it, that closes a connection on which no
    request is open and none has come whole, headers and all, for `limit_s` seconds.

    Beyond `max_callers` connections new ones get 503 at once.

    It also breaks one off of which, behind an answer, nothing was read for that long. Between
    requests uvicorn's own `timeout_keep_alive` counts, until the first byte of the next.
    """

    class Impatient(protocol):
        _timer: Any = None
        _before: Any = None
        """The last request when the timer was set. Bytes that trickle in set no new one."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect()
            if len(self.connections) > max_callers:
                transport.write(FULL)
                transport.close()

        def data_received(self, data: bytes) -> None:
            idle = self.cycle is None or self.cycle.response_complete
            if idle and (self._timer is None or self._before is not self.cycle):
                self._expect()
            super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch(self.transport.get_write_buffer_size() + 1)

        def _watch(self, before: int) -> None:
            unread = self.transport.get_write_buffer_size()
            if unread >= before:  # also a connection that is closing waits until this is read
                self.transport.abort()
            elif unread:
                self.loop.call_later(limit_s, self._watch, unread)

        def _expect(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._before = self.cycle
            self._timer = self.loop.call_later(limit_s, self._late)

        def _late(self) -> None:
            # another cycle means a request came whole; another protocol, that it was a web socket
            if self.cycle is self._before and self.transport.get_protocol() is self:
                self.transport.write(LATE)
                self.transport.close()

    return Impatient


def allow_many_files() -> int:
    """Raise this process's limit of open files: each caller takes one, and 1,024 is a usual
    limit. Returns how many of them may be callers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    files = MAX_FILES if soft == resource.RLIM_INFINITY else soft
    return max(files - OWN_FILES, files // 4)
