"""A running command seen from outside, and output kept within bounds."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

from openk3.errors import ConflictError, InputError, NotFoundError
from openk3.sandbox import frames
from openk3.sandbox.client import Call, Connection
from openk3.sandbox.requests import MAX_OUTPUT
from openk3.sandbox.types import Result

STREAMS = {
    frames.STREAM_OUT: "stdout",
    frames.STREAM_ERR: "stderr",
    frames.STREAM_TTY: "stdout",
    frames.STREAM_FILE: "file",
}


class Collector:
    """Keeps the first and the last half of `limit` bytes, and counts what fell between."""

    def __init__(self, limit: int) -> None:
        self.half = max(1, limit // 2)
        self.head = bytearray()
        self.tail = bytearray()
        self.num_bytes = 0

    def add(self, piece: bytes) -> None:
        self.num_bytes += len(piece)
        room = self.half - len(self.head)
        if room > 0:
            self.head += piece[:room]
            piece = piece[room:]
        self.tail += piece
        if len(self.tail) > 2 * self.half:
            del self.tail[: -self.half]

    @property
    def dropped(self) -> int:
        return max(0, self.num_bytes - len(self.head) - min(len(self.tail), self.half))

    def value(self) -> bytes:
        """All bytes, or head, a marker line and tail."""
        if not self.dropped:
            return bytes(self.head + self.tail)
        marker = f"\n[... {self.dropped} bytes dropped ...]\n".encode()
        return bytes(self.head) + marker + bytes(self.tail[-self.half :])


class Process:
    """One command in a sandbox. Iterate it for `(stream, bytes)`; `wait()` for its Result."""

    def __init__(self, connection: Connection, call: Call, max_output: int = MAX_OUTPUT) -> None:
        self.connection, self._call = connection, call
        self.pid = 0
        self.job = ""
        self.outputs = {"stdout": Collector(max_output), "stderr": Collector(max_output)}

    @classmethod
    async def begin(
        cls, connection: Connection, op: str, params: dict[str, Any], max_output: int = MAX_OUTPUT
    ) -> "Process":
        """Open the call and wait until the command runs. Raises what the agent answers instead."""
        process = cls(connection, connection.open(op, **params), max_output)
        try:
            _, started = await anext(process._call)
        except BaseException:
            process._call.cancel()
            raise
        process.pid, process.job = started["pid"], started["job"]
        return process

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, bytes]:
        try:
            kind, value = await anext(self._call)
            while kind != frames.DATA:
                kind, value = await anext(self._call)
        except asyncio.CancelledError:
            self._call.cancel()
            raise
        return STREAMS[value[0]], value[1:]

    async def wait(
        self,
        on_stdout: Callable[[bytes], Any] | None = None,
        on_stderr: Callable[[bytes], Any] | None = None,
    ) -> Result:
        """The Result, once the command has ended. Cancelling this kills a foreground command."""
        hooks = {"stdout": on_stdout, "stderr": on_stderr}
        async for stream, piece in self:
            self.outputs[stream].add(piece)
            hook = hooks[stream]
            if hook is not None and asyncio.iscoroutine(waiting := hook(piece)):
                await waiting
        return self._result(self.ended)

    async def talk(
        self,
        data: bytes | str,
        on_stdout: Callable[[bytes], Any] | None = None,
        on_stderr: Callable[[bytes], Any] | None = None,
    ) -> Result:
        """`wait`, with the whole standard input given meanwhile: a filter writes as it reads."""
        feeding = asyncio.ensure_future(self._feed(data))
        waiting = asyncio.ensure_future(self.wait(on_stdout, on_stderr))
        try:
            await asyncio.wait({feeding, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                feeding.result()
            return await waiting
        finally:
            for task in (feeding, waiting):
                task.cancel()
            await asyncio.gather(feeding, waiting, return_exceptions=True)

    async def _feed(self, data: bytes | str) -> None:
        try:
            await self.send(data.encode() if isinstance(data, str) else data)
            self.close_stdin()
        except (ConflictError, InputError, NotFoundError):
            return  # it has ended, or closed its input, and its result says how that was

    def _result(self, ended: dict[str, Any]) -> Result:
        out, err = self.outputs["stdout"].value(), self.outputs["stderr"].value()
        return Result(
            stdout=out.decode(errors="replace"),
            stderr=err.decode(errors="replace"),
            exit_code=ended["exit_code"],
            timed_out=ended["timed_out"],
            truncated=any(collector.dropped for collector in self.outputs.values()),
            reason=ended["reason"],
            stdout_bytes=out,
            stderr_bytes=err,
        )

    @property
    def ended(self) -> dict[str, Any]:
        """What the agent said of its end: exit_code, signal, timed_out, reason."""
        return self._call.value

    async def send(self, data: bytes) -> None:
        """Bytes to its standard input, as fast as it reads them."""
        await self._call.send(data)

    def close_stdin(self) -> None:
        self._call.send_eof()

    async def signal(self, number: int, family: bool = True) -> None:
        """Signal the command, by default with everything it started."""
        await self.connection.call("signal", job=self.job, signal=number, family=family)

    async def kill(self) -> bool:
        """SIGKILL the whole family. False when it had already ended."""
        try:
            await self.connection.call("signal", job=self.job, signal=9, family=True)
        except (LookupError, ConflictError):
            return False
        return True

    async def resize(self, rows: int, cols: int) -> None:
        """New size of its terminal."""
        await self.connection.call("resize", job=self.job, tty=[rows, cols])

    def let_go(self) -> None:
        """Stop listening: a detached command runs on, a foreground one is killed."""
        self._call.cancel()
