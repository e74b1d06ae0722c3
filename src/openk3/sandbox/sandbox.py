"""The public interface: one isolated machine with files, processes and memory, on any backend."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from openk3.errors import InputError
from openk3.sandbox.files import Files
from openk3.sandbox.process import MAX_OUTPUT, Process
from openk3.sandbox.types import Info, Limits, Network, Result, SnapshotInfo

Command = str | list[str]


class Sandbox(ABC):
    """Make one with `await Sandbox.create()`, find one with `await Sandbox.connect(id)`.

    As an async context manager it kills itself at the end of the block.
    """

    id: str
    files: Files

    # -- making and finding -----------------------------------------------------------------

    @staticmethod
    async def create(
        template: str = "python",
        *,
        backend: str = "auto",
        timeout: float | None = 300.0,
        on_timeout: str = "kill",
        idle_pause: float | None = None,
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        user: str = "user",
        allow_files_only: bool = False,
        pool: Any = None,
    ) -> "Sandbox":
        """A new sandbox from a template or snapshot.

        backend: `auto`, `gvisor`, `bwrap`, `agentenv` or `inprocess`. `auto` takes AgentENV when
            E2B_API_URL is set, else gVisor; it takes bubblewrap only with `allow_files_only`, as
            processes do not survive a pause there. It never falls back to weaker isolation unasked.
        timeout: seconds until `on_timeout` (`kill` or `pause`) happens; None for never.
        idle_pause: seconds without any call after which the sandbox pauses itself.
        Raises BackendError for what the backend cannot do, InputError for wrong arguments,
        NotFoundError for an unknown template, LimitError, StorageError.
        """
        from openk3.sandbox import backends

        if on_timeout not in ("kill", "pause"):
            raise InputError(f"on_timeout = {on_timeout!r}: 'kill' or 'pause'")
        if timeout is not None and timeout <= 0:
            raise InputError(f"timeout = {timeout!r}: a positive number of seconds, or None")
        return await backends.create(
            backend,
            template=template,
            timeout=timeout,
            on_timeout=on_timeout,
            idle_pause=idle_pause,
            env=dict(env or {}),
            metadata=dict(metadata or {}),
            limits=limits or Limits(),
            network=network or Network(),
            user=user,
            allow_files_only=allow_files_only,
            pool=pool,
        )

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

    # -- commands ---------------------------------------------------------------------------

    @abstractmethod
    async def start(
        self,
        cmd: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        stdin: bool = False,
        tty: tuple[int, int] | None = None,
        detach: bool = False,
        tag: str | None = None,
        output_limit: int | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> Process:
        """Start a command: a string for the shell, a list for no shell.

        timeout: seconds after which it and everything it started is killed.
        tty: (rows, columns) of a terminal to give it.
        detach: it outlives this connection; otherwise letting go of it kills it.
        tag: a name to `attach` to it by.
        output_limit: bytes of output after which it is killed with reason `output_limit`.
        """

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
        timeout: float | None = None,
        input: bytes | str | None = None,
        on_stdout: Callable[[bytes], Any] | None = None,
        on_stderr: Callable[[bytes], Any] | None = None,
        max_output: int = MAX_OUTPUT,
        **options: Any,
    ) -> Result:
        """Run a command to its end. `options` as for `start`.

        Output is streamed to `on_stdout`/`on_stderr` as it comes; the Result keeps at most
        `max_output` bytes of each stream. Cancelling kills the command and all it started.
        """
        process = await self.start(
            cmd, timeout=timeout, stdin=input is not None, max_output=max_output, **options
        )
        if input is not None:
            await process.send(input.encode() if isinstance(input, str) else input)
            process.close_stdin()
        return await process.wait(on_stdout, on_stderr)

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
    async def fork(self, count: int = 1, *, timeout: float | None = 300.0) -> "list[Sandbox]":
        """Copies that go on from this moment, each with an identity of its own."""

    @abstractmethod
    async def snapshot(self, name: str | None = None) -> SnapshotInfo:
        """An immutable copy to `create` from later."""

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
