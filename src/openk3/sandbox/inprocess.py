"""A deterministic fake for unit tests: no isolation, no processes, nothing runs.

Commands are answered by functions that the test registers; files are a dictionary. Pause, fork and
snapshot copy that dictionary. Never a place for code one does not trust, or for any code at all.
"""

import asyncio
import copy
import itertools
import posixpath
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from openk3.errors import BackendError, ConflictError, NotFoundError
from openk3.sandbox.files import Content, Files
from openk3.sandbox.process import Process
from openk3.sandbox.requests import Command, ProcessRequest, SandboxRequest
from openk3.sandbox.sandbox import Sandbox
from openk3.sandbox.types import Capabilities, Entry, Info, Result, SnapshotInfo, State

Reply = Callable[["InProcessSandbox", Command], "Result | str"]
_numbers = itertools.count(1)
_snapshots: dict[str, "dict[str, bytes]"] = {}


class FakeFiles(Files):
    """Files in a dictionary; folders exist when something lies below them."""

    def __init__(self, box: "InProcessSandbox") -> None:
        self.box = box

    def _place(self, path: str) -> str:
        self.box.require_running()
        return posixpath.normpath(posixpath.join("/home/user", path))

    def _entry(self, path: str) -> Entry:
        content = self.box.content
        name = posixpath.basename(path)
        if path in content:
            return Entry(name, path, "file", len(content[path]), 0o644, 1000, 1000, 0.0)
        if path == "/" or any(other.startswith(path + "/") for other in content):
            return Entry(name, path, "dir", 0, 0o755, 1000, 1000, 0.0)
        raise NotFoundError(f"{path!r}: no such file or directory")

    async def stream(
        self, path: str, *, offset: int = 0, limit: int | None = None, user: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        place = self._place(path)
        if place not in self.box.content:
            raise NotFoundError(f"{path!r}: no such file")
        yield self.box.content[place][offset : None if limit is None else offset + limit]

    async def write(
        self, path: str, data: Content, *, mode: int | None = None, user: str | None = None
    ) -> Entry:
        place = self._place(path)
        if isinstance(data, AsyncIterator):
            data = b"".join([piece async for piece in data])
        assert isinstance(data, bytes | str), "an async iterator was read above"
        self.box.content[place] = data.encode() if isinstance(data, str) else data
        return self._entry(place)

    async def list(
        self, path: str = ".", *, depth: int = 1, user: str | None = None
    ) -> list[Entry]:
        top = self._place(path)
        found = set()
        for other in self.box.content:
            if other.startswith(top.rstrip("/") + "/"):
                parts = other[len(top.rstrip("/")) + 1 :].split("/")
                for count in range(1, min(depth, len(parts)) + 1):
                    found.add(posixpath.join(top, *parts[:count]))
        return [self._entry(place) for place in sorted(found)]

    async def stat(self, path: str, *, user: str | None = None) -> Entry:
        return self._entry(self._place(path))

    async def mkdir(self, path: str, *, user: str | None = None) -> bool:
        self._place(path)
        return True

    async def move(self, path: str, target: str, *, user: str | None = None) -> Entry:
        old, new = self._place(path), self._place(target)
        self._entry(old)
        for place in list(self.box.content):
            if place == old or place.startswith(old + "/"):
                self.box.content[new + place[len(old) :]] = self.box.content.pop(place)
        return self._entry(new)

    async def remove(self, path: str, *, user: str | None = None) -> None:
        old = self._place(path)
        self._entry(old)
        for place in list(self.box.content):
            if place == old or place.startswith(old + "/"):
                del self.box.content[place]


class InProcessSandbox(Sandbox):
    """`create(backend="inprocess")`; give it answers with `answers["command"] = function`."""

    def __init__(self, wanted: SandboxRequest) -> None:
        number = next(_numbers)
        self._wanted = wanted
        self.id = f"fake{number:016d}"
        self.answers: dict[str, Reply] = {}
        self.content = dict(_snapshots.get(wanted.template, {}))
        self.files = FakeFiles(self)
        self.commands: list[Command] = []
        self._state: State | None = State.RUNNING
        self._info = Info(
            id=self.id,
            state=State.RUNNING,
            backend="inprocess",
            isolation="none",
            capabilities=Capabilities(True, True, False, False, False, False),
            template=wanted.template,
            limits=wanted.limits,
            metadata=dict(wanted.metadata),
            env=dict(wanted.env),
            generation=f"{self.id}-1",
        )

    def require_running(self) -> None:
        if self._state is None:
            raise NotFoundError(f"sandbox {self.id} was killed")
        if self._state != State.RUNNING:
            raise ConflictError(f"sandbox {self.id} is not running")

    async def run(self, cmd: Command, **options: Any) -> Result:
        """What the registered function for the whole command or its first word says."""
        self.require_running()
        self.commands.append(cmd)
        words = cmd.split() if isinstance(cmd, str) else cmd
        for key in (cmd if isinstance(cmd, str) else " ".join(cmd), words[0], "*"):
            if key in self.answers:
                said = self.answers[key](self, cmd)
                break
        else:
            said = Result("", f"{words[0]}: no answer registered\n", 127)
        await asyncio.sleep(0)
        result = Result(said, "", 0) if isinstance(said, str) else said
        return replace(
            result, stdout_bytes=result.stdout.encode(), stderr_bytes=result.stderr.encode()
        )

    async def _start(self, request: ProcessRequest) -> Process:
        raise BackendError("backend inprocess runs no processes; use run()")

    async def attach(self, *, pid: int | None = None, tag: str | None = None) -> Process:
        raise BackendError("backend inprocess runs no processes")

    async def processes(self) -> list[dict[str, Any]]:
        return []

    @property
    def info(self) -> Info:
        return replace(self._info, state=self._state or State.LOST)

    async def refresh(self) -> Info:
        return self.info

    async def pause(self, *, memory: bool = True) -> None:
        self.require_running()
        self._state = State.PAUSED

    async def resume(self, timeout: float | None = None) -> None:
        if self._state != State.PAUSED:
            raise ConflictError(f"sandbox {self.id} is not paused")
        self._state = State.RUNNING
        self._info = replace(self._info, generation=self._info.generation + "+")

    async def fork(
        self, count: int = 1, *, timeout: float | None = 300.0, memory: bool = True
    ) -> list[Sandbox]:
        copies: list[Sandbox] = []
        for _ in range(count):
            other = InProcessSandbox(self._wanted)
            other.content, other.answers = copy.deepcopy(self.content), dict(self.answers)
            copies.append(other)
        return copies

    async def snapshot(self, name: str | None = None, *, memory: bool = True) -> SnapshotInfo:
        snapshot_id = f"snapfake{next(_numbers):012d}"
        _snapshots[snapshot_id] = copy.deepcopy(self.content)
        size = sum(map(len, self.content.values()))
        return SnapshotInfo(snapshot_id, name, self.id, 0.0, True, size)

    async def set_timeout(self, seconds: float | None) -> None:
        self.require_running()

    async def kill(self) -> bool:
        was, self._state = self._state, None
        return was is not None

    async def close(self) -> None:
        return
