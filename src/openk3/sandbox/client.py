"""The client side of a keeper's socket: many calls at once, each with its own flow control."""

import asyncio
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from openk3.errors import (
    BackendError,
    CheckpointError,
    ConflictError,
    DeniedError,
    InputError,
    LimitError,
    NotFoundError,
    OpenK3Error,
    StorageError,
)
from openk3.sandbox import frames

ERRORS: dict[str, type[OpenK3Error]] = {
    "input": InputError,
    "not_found": NotFoundError,
    "conflict": ConflictError,
    "ended": NotFoundError,
    "permission": DeniedError,
    "exists": ConflictError,
    "no_space": StorageError,
    "limit": LimitError,
    "damaged": CheckpointError,
    "failed": BackendError,
}


class Call:
    """One open call. Iterate it to its end for `.value`, or `await result()`."""

    def __init__(self, connection: "Connection", number: int) -> None:
        self.connection, self.number = connection, number
        self.inbox: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        self.credit = frames.WINDOW
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.ended = False
        self.unpaid = 0
        self.value: Any = None

    def on_frame(self, kind: int, payload: bytes) -> None:
        if kind == frames.CREDIT:
            self.credit += frames.credit_of(payload)
            self.may_send.set()
            return
        if kind in (frames.END, frames.ERROR):
            self.may_send.set()
            self.connection.calls.pop(self.number, None)
        self.inbox.put_nowait((kind, payload))

    async def next(self) -> tuple[int, Any] | None:
        """`(EVENT, value)` or `(DATA, bytes)`; None once the call has ended with `.value`.

        Raises the OpenK3Error that the other side sent.
        """
        if self.unpaid:
            self.connection.send(frames.pack_credit(self.number, self.unpaid))
            self.unpaid = 0
        if self.ended:
            return None
        kind, payload = await self.inbox.get()
        if kind == frames.DATA:
            self.unpaid = len(payload) - 1
            return kind, payload
        value = json.loads(payload)
        if kind == frames.EVENT:
            return kind, value
        self.ended, self.value = True, value
        if kind == frames.ERROR:
            raise ERRORS.get(value["kind"], BackendError)(value["message"])
        return None

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> tuple[int, Any]:
        item = await self.next()
        if item is None:
            raise StopAsyncIteration
        return item

    async def result(self) -> Any:
        """The value of END; data and events on the way are dropped."""
        async for _ in self:
            continue
        return self.value

    async def send(self, data: bytes) -> None:
        """DATA to the other side, no faster than it takes it."""
        view = memoryview(data)
        while view and self.number in self.connection.calls:
            if self.credit <= 0:
                self.may_send.clear()
                await self.may_send.wait()
                continue
            piece = view[: min(frames.PIECE, self.credit)]
            self.credit -= len(piece)
            self.connection.send(frames.pack(self.number, frames.DATA, bytes(piece)))
            await self.connection.drain()
            view = view[len(piece) :]

    def send_eof(self) -> None:
        """No more DATA."""
        self.connection.send(frames.pack(self.number, frames.EOF))

    def cancel(self) -> None:
        """Give the call up; what it started and did not detach is killed."""
        if self.number in self.connection.calls:
            del self.connection.calls[self.number]
            self.connection.send(frames.pack(self.number, frames.CANCEL))
        self.ended = True


class Connection:
    """A socket to one keeper."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.calls: dict[int, Call] = {}
        self.next_number = 1
        self.greeting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.closed = False
        self.task = asyncio.create_task(self._read())

    @classmethod
    async def over(cls, sock: socket.socket) -> "Connection":
        """Wrap a connected socket."""
        return cls(*await asyncio.open_unix_connection(sock=sock))

    @classmethod
    async def to_box(cls, folder: Path) -> "Connection":
        """Connect to the keeper of a box. Raises ConflictError when none listens."""
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            sock.close()
            raise NotFoundError(f"no sandbox {folder.name}") from None
        try:
            # the short name lifts the 108-byte limit on socket addresses
            await asyncio.get_running_loop().sock_connect(sock, f"/proc/self/fd/{handle}/sock")
        except OSError:
            sock.close()
            raise ConflictError(f"sandbox {folder.name} is not running") from None
        finally:
            os.close(handle)
        return await cls.over(sock)

    async def _read(self) -> None:
        decoder = frames.Decoder()
        try:
            while piece := await self.reader.read(256 << 10):
                for number, kind, payload in decoder.feed(piece):
                    self._deliver(number, kind, payload)
        except (OSError, frames.FrameError):
            pass  # as good as closed: every open call hears of it below
        self.closed = True
        lost = json.dumps({"kind": "conflict", "message": "the sandbox's keeper hung up"}).encode()
        for number in list(self.calls):
            self._deliver(number, frames.ERROR, lost)
        if not self.greeting.done():
            self.greeting.set_result((frames.ERROR, json.loads(lost)))

    def _deliver(self, number: int, kind: int, payload: bytes) -> None:
        if number == 0:
            if not self.greeting.done():
                self.greeting.set_result((kind, json.loads(payload)))
        elif call := self.calls.get(number):
            call.on_frame(kind, payload)

    async def greet(self, timeout: float) -> dict[str, Any]:
        """What the keeper says once the machine answers. Raises the error it reports instead."""
        kind, value = await asyncio.wait_for(asyncio.shield(self.greeting), timeout)
        if kind == frames.ERROR:
            raise ERRORS.get(value["kind"], BackendError)(value["message"])
        return value

    def open(self, op: str, **params: Any) -> Call:
        """Start a call. Raises ConflictError on a closed connection."""
        if self.closed:
            raise ConflictError("the sandbox's keeper hung up")
        call = Call(self, self.next_number)
        self.next_number += 1
        self.calls[call.number] = call
        self.send(frames.pack_json(call.number, frames.CALL, {"op": op, **params}))
        return call

    async def call(self, op: str, **params: Any) -> Any:
        """A call whose END value is all that matters; cancelled along with the awaiting task."""
        call = self.open(op, **params)
        try:
            return await call.result()
        finally:
            call.cancel()

    def send(self, frame: bytes) -> None:
        if not self.closed and not self.writer.is_closing():
            self.writer.write(frame)

    async def drain(self) -> None:
        try:
            await self.writer.drain()
        except OSError:
            return  # the reader notices and ends every call

    async def close(self) -> None:
        """Hang up, so that the keeper hears of it even when this event loop stops right after."""
        self.closed = True
        self.task.cancel()
        sock = self.writer.get_extra_info("socket")
        if sock is not None and not self.writer.transport.get_write_buffer_size():
            with suppress(OSError):  # the keeper was first
                sock.shutdown(socket.SHUT_RDWR)
        self.writer.close()
