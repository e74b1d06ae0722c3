"""A command in a remote sandbox."""

import asyncio
import base64
from collections.abc import AsyncGenerator
from typing import Any

from openk3.errors import BackendError, ConflictError
from openk3.sandbox.agentenv.link import RemoteConnection
from openk3.sandbox.process import Collector, Process


class RemoteProcess(Process):
    """A command over the protocol's streams."""

    def __init__(
        self, link: RemoteConnection, source: AsyncGenerator[dict[str, Any], None], limit: int
    ) -> None:
        self.link, self.source = link, source
        self.pid, self.job, self.detached = 0, "", False
        self.outputs = {"stdout": Collector(limit), "stderr": Collector(limit)}
        self._ended: dict[str, Any] = {}

    async def opened(self) -> "RemoteProcess":
        first = await anext(self.source)
        self.pid = first["event"]["start"]["pid"]
        return self

    @property
    def ended(self) -> dict[str, Any]:
        return self._ended

    async def __anext__(self) -> tuple[str, bytes]:
        try:
            async for message in self.source:
                event = message.get("event", {})
                for name, text in event.get("data", {}).items():
                    return "stdout" if name == "pty" else name, base64.b64decode(text)
                if end := event.get("end"):
                    self._ended = {
                        "exit_code": end.get("exitCode", 0),
                        "signal": None,
                        "timed_out": False,
                        "reason": end.get("error"),
                    }
        except TimeoutError:
            self._ended = {"exit_code": 137, "signal": 9, "timed_out": True, "reason": None}
        except asyncio.CancelledError:
            if not self.detached:
                await self.kill()
            raise
        if not self._ended:
            raise ConflictError("the stream of the command broke off; the sandbox may be gone")
        raise StopAsyncIteration

    async def send(self, data: bytes) -> None:
        value = {"stdin": base64.b64encode(data).decode()}
        body = {"process": {"pid": self.pid}, "input": value}
        await self.link.unary("process.Process/SendInput", body)

    def close_stdin(self) -> None:
        body = {"process": {"pid": self.pid}}
        self._closing = asyncio.ensure_future(self.link.unary("process.Process/CloseStdin", body))

    async def signal(self, number: int, family: bool = True) -> None:
        names = {9: "SIGNAL_SIGKILL", 15: "SIGNAL_SIGTERM"}
        if number not in names:
            raise BackendError(f"the protocol can send signals 9 and 15, not {number}")
        body = {"process": {"pid": self.pid}, "signal": names[number]}
        await self.link.unary("process.Process/SendSignal", body)

    async def kill(self) -> bool:
        try:
            await self.signal(9)
        except (LookupError, ConflictError):
            return False
        return True

    async def resize(self, rows: int, cols: int) -> None:
        size = {"rows": rows, "cols": cols}
        body = {"process": {"pid": self.pid}, "pty": {"size": size}}
        await self.link.unary("process.Process/Update", body)

    def let_go(self) -> None:
        self._closing = asyncio.ensure_future(self.source.aclose())
