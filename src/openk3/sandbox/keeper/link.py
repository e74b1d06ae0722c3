"""Frames between the keeper's clients and the agent: pure relaying, with channel numbers mapped."""

import asyncio
import json
from contextlib import suppress
from typing import Any

from openk3.sandbox import frames


class AgentLink:
    """The two pipes of the agent. `call` is for the keeper itself; clients go through `open`."""

    def __init__(self) -> None:
        self.next_channel = 1
        self.routes: dict[int, tuple[ClientLink, int]] = {}
        self.own: dict[int, asyncio.Future[Any]] = {}
        self.writer: asyncio.StreamWriter | None = None
        self.transport: asyncio.BaseTransport | None = None
        self.task: asyncio.Task[None] | None = None
        self.closed = asyncio.Event()
        self.held: list[bytes] | None = None

    async def attach(self, read_fd: int, write_fd: int) -> None:
        """Take over fresh pipes; channel numbers go on."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 20)
        self.transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader),
            open(read_fd, "rb", buffering=0),  # noqa: SIM115 (the transport closes it)
        )
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin,
            open(write_fd, "wb", buffering=0),  # noqa: SIM115 (the transport closes it)
        )
        self.writer = asyncio.StreamWriter(transport, protocol, None, loop)
        self.closed = asyncio.Event()
        self.task = loop.create_task(self._read(reader, self.closed))

    async def _read(self, reader: asyncio.StreamReader, closed: asyncio.Event) -> None:
        decoder = frames.Decoder()
        try:
            while piece := await reader.read(256 << 10):
                for channel, kind, payload in decoder.feed(piece):
                    self._route(channel, kind, payload)
        except (OSError, frames.FrameError):
            pass  # a machine that speaks nonsense is treated like one that hung up
        closed.set()

    def _route(self, channel: int, kind: int, payload: bytes) -> None:
        ends = kind in (frames.END, frames.ERROR)
        if channel in self.own:
            future = self.own[channel]
            if ends and not future.done():
                future.set_result((kind, json.loads(payload)))
            return
        route = self.routes.get(channel)
        if route is None:
            return
        client, number = route
        client.send(frames.pack(number, kind, payload))
        if ends:
            self.forget(channel)

    def forget(self, channel: int) -> None:
        client, number = self.routes.pop(channel, (None, 0))
        if client:
            client.channels.pop(number, None)

    def hold(self) -> None:
        """Keep what clients send: an agent that is being saved must not be spoken to.

        Bounded by the clients' flow control. The keeper's own calls pass.
        """
        self.held = []

    def release(self) -> None:
        """Send what was kept, to the same agent or to the one restored from it."""
        held, self.held = self.held or [], None
        for frame in held:
            self.send(frame)

    def send(self, frame: bytes) -> None:
        if self.held is not None:
            self.held.append(frame)
        else:
            self._write(frame)

    def _write(self, frame: bytes) -> None:
        if self.writer and not self.closed.is_set():
            self.writer.write(frame)

    async def drain(self) -> None:
        if self.writer:
            with suppress(OSError):  # the machine is gone, which the keeper's watch deals with
                await self.writer.drain()

    def end_calls(self, kind: str, message: str) -> None:
        """Every client that waits for the agent hears that it waits in vain."""
        for channel, (client, number) in list(self.routes.items()):
            client.error(number, kind, message)
            self.forget(channel)

    def open(self, client: "ClientLink", number: int) -> int:
        """A new agent channel for a client's channel."""
        channel = self.next_channel
        self.next_channel += 1
        self.routes[channel] = (client, number)
        client.channels[number] = channel
        return channel

    async def call(self, op: str, timeout: float, **params: Any) -> Any:
        """One call of the keeper's own. TimeoutError, or ConnectionError when the agent is gone."""
        channel = self.next_channel
        self.next_channel += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.own[channel] = future
        gone = asyncio.ensure_future(self.closed.wait())
        try:
            self._write(frames.pack_json(channel, frames.CALL, {"op": op, **params}))
            await asyncio.wait({future, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                if gone.done():
                    raise ConnectionError(f"the machine ended before it answered {op!r}")
                raise TimeoutError(f"the agent did not answer {op!r} in {timeout:g} s")
            kind, value = future.result()
            if kind == frames.ERROR:
                raise ConnectionError(f"the agent refused {op!r}: {value['message']}")
            return value
        finally:
            gone.cancel()
            self.own.pop(channel, None)

    def detach(self) -> None:
        """Close our ends of the pipes."""
        self.closed.set()
        if self.task:
            self.task.cancel()
        if self.writer:
            self.writer.close()
        if self.transport:
            self.transport.close()


class ClientLink:
    """One client connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.decoder = frames.Decoder()
        self.channels: dict[int, int] = {}

    def send(self, frame: bytes) -> None:
        if not self.writer.is_closing():
            self.writer.write(frame)

    def end(self, number: int, value: Any = None) -> None:
        self.send(frames.pack_json(number, frames.END, value))

    def error(self, number: int, kind: str, message: str) -> None:
        self.send(frames.pack_json(number, frames.ERROR, {"kind": kind, "message": message}))

    async def read(self) -> list[tuple[int, int, bytes]] | None:
        """The next frames, or None when the client is gone."""
        try:
            piece = await self.reader.read(256 << 10)
            return self.decoder.feed(piece) if piece else None
        except (OSError, frames.FrameError):
            return None
