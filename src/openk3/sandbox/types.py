"""The words of the sandbox interface: results, limits, policies, states."""

from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from openk3.errors import InputError, nearest


class State(StrEnum):
    """Where a sandbox is in its life. A paused one holds no process and no memory."""

    RUNNING = "running"
    PAUSED = "paused"
    LOST = "lost"  # its host or keeper died before it was ever paused


@dataclass(frozen=True)
class Limits:
    """Quotas of one sandbox. What a backend cannot enforce is in `Capabilities`."""

    cpus: float = 1.0
    """Processor share, in cores."""
    memory_mb: int = 1024
    """MiB of memory; beyond it the sandbox ends with reason `oom`."""
    disk_mb: int = 2048
    """MiB that files written in the sandbox may take; beyond it writes fail with ENOSPC."""
    processes: int = 256
    """Processes that commands of the default user may start; beyond it fork fails with EAGAIN."""
    commands: int = 128
    """Commands running at once."""
    output_bytes: int = 1 << 30
    """Output of one command in bytes; beyond it the command is killed."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
                raise InputError(f"limits.{item.name} = {value!r}: a positive number is needed")
        for name, least in (("memory_mb", 64), ("disk_mb", 16), ("processes", 8)):
            if getattr(self, name) < least:
                raise InputError(
                    f"limits.{name} = {getattr(self, name)}: at least {least} is needed"
                )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Raises InputError on an unknown key."""
        return _from_dict(cls, values)


@dataclass(frozen=True)
class Network:
    """What the sandbox may reach. The local backends offer no network at all."""

    internet: bool = False
    """Whether outgoing connections are allowed."""
    allow_out: tuple[str, ...] = ()
    """CIDR blocks or domains that are allowed when `internet` is False."""
    deny_out: tuple[str, ...] = ()
    """CIDR blocks that are refused when `internet` is True; `allow_out` wins."""

    @property
    def wanted(self) -> bool:
        return self.internet or bool(self.allow_out)


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do on this machine; asked for more, it raises BackendError."""

    memory: bool
    """Processes and memory survive pause, snapshot and fork."""
    fork: bool
    """`fork` works at all."""
    network: bool
    """A network policy other than none can be given."""
    cpu_limit: bool
    """`limits.cpus` is enforced by the kernel."""
    memory_limit: bool
    """`limits.memory_mb` is enforced by the kernel."""
    disk_limit: bool
    """`limits.disk_mb` is enforced by the file system."""


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    stdout: str
    """Standard output, undecodable bytes replaced; see `truncated`."""
    stderr: str
    """Standard error likewise."""
    exit_code: int
    """The shell's convention: 128 + n when signal n ended it."""
    timed_out: bool = False
    """Its time limit ended it, and everything it had started."""
    truncated: bool = False
    """Output beyond `max_output` was dropped from the middle; a marker says how much."""
    reason: str | None = None
    """`output_limit`, `cancelled`, or None."""
    stdout_bytes: bytes = b""
    """Standard output as it came."""
    stderr_bytes: bytes = b""
    """Standard error as it came."""


@dataclass(frozen=True)
class Entry:
    """One path inside a sandbox."""

    name: str
    path: str
    kind: str
    """`file`, `dir`, `symlink` or `other`."""
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: str | None = None
    """Where a symlink points."""


@dataclass(frozen=True)
class Info:
    """What is known of a sandbox without asking the machine inside."""

    id: str
    state: State
    backend: str
    isolation: str
    """`microvm`, `gvisor`, `namespace`, or `none` (the fake)."""
    capabilities: Capabilities
    template: str
    limits: Limits
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    created: float = 0.0
    """Unix time."""
    deadline: float | None = None
    """Unix time at which `on_timeout` happens, while running."""
    on_timeout: str = "kill"
    """`kill` or `pause`."""
    generation: str = ""
    """Changes with every resume and fork."""
    reason: str | None = None
    """Why it is in this state, when that was nobody's request."""


@dataclass(frozen=True)
class SnapshotInfo:
    """An immutable saved state that `Sandbox.create(snapshot)` starts from."""

    id: str
    name: str | None
    sandbox_id: str
    created: float
    memory: bool
    size_bytes: int


def to_dict(value: Any) -> dict[str, Any]:
    """A dataclass of this module as plain JSON values."""
    return asdict(value)


def _from_dict(cls: Any, values: dict[str, Any]) -> Any:
    names = {item.name for item in fields(cls)}
    for key in values:
        if key not in names:
            raise InputError(f"{cls.__name__} has no field {key!r}{nearest(key, names)}")
    return cls(**values)
