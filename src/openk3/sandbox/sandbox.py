"""The public interface: one isolated machine with files, processes and memory, on any backend."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from openk3.sandbox.files import Files
from openk3.sandbox.process import Process
from openk3.sandbox.requests import Command, ProcessRequest, SandboxRequest
from openk3.sandbox.types import Info, Result, SnapshotInfo


class Sandbox(ABC):
    """Make one with `await Sandbox.create()`, find one with `await Sandbox.connect(id)`.

    As an async context manager it kills itself at the end of the block.
    """

    id: str
    files: Files

    # -- making and finding -----------------------------------------------------------------

    @staticmethod
    async def create(
        template: str = "python", *, backend: str = "auto", pool: Any = None, **options: Any
    ) -> "Sandbox":
        """A new sandbox from a template or snapshot; `options` are those of `SandboxRequest`.

        backend: `auto`, `gvisor`, `bwrap`, `agentenv` or `inprocess`. `auto` takes AgentENV when
            E2B_API_URL is set, else gVisor; it takes bubblewrap only with `allow_files_only`, as
            processes do not survive a pause there. It never falls back to weaker isolation unasked.
        Raises BackendError for what the backend cannot do, InputError for wrong arguments,
        NotFoundError for an unknown template, LimitError, StorageError.
        """
        from openk3.sandbox import backends

        request = SandboxRequest.of({"template": template, **options})
        return await backends.create(backend, request, pool)

    @staticmethod
    async def connect(
        sandbox_id: str, *, timeout: float | None = None, backend: str = "auto", pool: Any = None
    ) -> "Sandbox":
        """An existing sandbox; a paused one is resumed. Raises NotFoundError."""
        from openk3.sandbox import backends

        return await backends.connect(sandbox_id, backend=backend, timeout=timeout, pool=pool)

    @staticmethod
    async def list(*, backend: str = "auto", pool: Any = None) -> "list[Info]":
        """All sandboxes of a backend, oldest first."""
        from openk3.sandbox import backends

        return await backends.list_all(backend=backend, pool=pool)

    @staticmethod
    async def delete_snapshot(snapshot_id: str, *, backend: str = "auto", pool: Any = None) -> None:
        """Sandboxes made from it are unaffected. Raises NotFoundError."""
        from openk3.sandbox import backends

        await backends.delete_snapshot(snapshot_id, backend=backend, pool=pool)

    # -- commands ---------------------------------------------------------------------------

    async def start(self, cmd: Command, **options: Any) -> Process:
        """Start a command; `options` are those of `ProcessRequest`. Raises InputError."""
        return await self._start(ProcessRequest.of({"cmd": cmd, **options}))

    @abstractmethod
    async def _start(self, request: ProcessRequest) -> Process:
        """What `start` does on this backend."""

    @abstractmethod
    async def attach(self, *, pid: int | None = None, tag: str | None = None) -> Process:
        """A running or just finished detached command. Raises NotFoundError."""

    @abstractmethod
    async def processes(self) -> "list[dict[str, Any]]":
        """Commands that run, and detached ones whose result nobody has fetched."""

    async def run(
        self,
        cmd: Command,
        *,
        input: bytes | str | None = None,
        on_stdout: Callable[[bytes], Any] | None = None,
        on_stderr: Callable[[bytes], Any] | None = None,
        **options: Any,
    ) -> Result:
        """Run a command to its end; `options` are those of `ProcessRequest`.

        Output is streamed to `on_stdout`/`on_stderr` as it comes; the Result keeps at most
        `max_output` bytes of each stream. Cancelling kills the command and all it started.
        """
        process = await self.start(cmd, stdin=input is not None, **options)
        if input is None:
            return await process.wait(on_stdout, on_stderr)
        return await process.talk(input, on_stdout, on_stderr)

    # -- life -------------------------------------------------------------------------------

    @property
    @abstractmethod
    def info(self) -> Info:
        """What was last known; `refresh` asks again."""

    @abstractmethod
    async def refresh(self) -> Info:
        """Current state, deadline and generation."""

    @abstractmethod
    async def pause(self, *, memory: bool = True) -> None:
        """Save everything and stop: no process and no memory is left.

        Raises ConflictError when it cannot be saved now; it then runs on. With `memory=False` only
        files are kept, which is all that backend `bwrap` can do.
        """

    @abstractmethod
    async def resume(self, timeout: float | None = None) -> None:
        """Go on where `pause` stopped. Raises CheckpointError when the image is damaged."""

    @abstractmethod
    async def fork(
        self, count: int = 1, *, timeout: float | None = 300.0, memory: bool = True
    ) -> "list[Sandbox]":
        """Copies that go on from this moment, each with an identity of its own.

        With `memory=False` only the files do: processes end, also those of the original.
        """

    @abstractmethod
    async def snapshot(self, name: str | None = None, *, memory: bool = True) -> SnapshotInfo:
        """An immutable copy to `create` from later; `memory` as for `fork`."""

    @abstractmethod
    async def set_timeout(self, seconds: float | None) -> None:
        """Count the time limit anew from now; None lifts it."""

    @abstractmethod
    async def kill(self) -> bool:
        """End and delete it. False when it was gone already."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of the connection; the sandbox lives on."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.kill()
