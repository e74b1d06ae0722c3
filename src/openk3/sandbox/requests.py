"""What a caller asks for, as one value that is checked once and passed down to the backend."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Self

from openk3.errors import InputError, nearest
from openk3.sandbox.types import Limits, Network

Command = str | list[str]
MAX_OUTPUT = 16 << 20


class Request:
    """A frozen dataclass made from a call's keyword arguments."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Raises InputError for an option that does not exist, or a value that makes no sense."""
        known = {item.name: item for item in fields(cls)}  # pyright: ignore[reportArgumentType]
        for key in options:
            if key not in known:
                raise InputError(f"no option {key!r}{nearest(key, set(known))}: {', '.join(known)}")
        made = {key for key, item in known.items() if item.default_factory is not MISSING}
        unset = {key for key, value in options.items() if value is None and key in made}
        return cls(**{key: value for key, value in options.items() if key not in unset})


@dataclass(frozen=True)
class SandboxRequest(Request):
    """A new sandbox: the options of `Sandbox.create`."""

    template: str = "python"
    """A template, or a snapshot's id or name."""
    timeout: float | None = 300.0
    """Seconds until `on_timeout` happens; None for never."""
    on_timeout: str = "kill"
    """`kill` or `pause`."""
    idle_pause: float | None = None
    """Seconds without any call after which the sandbox pauses itself."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of every command."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Whatever the caller wants to find it by."""
    limits: Limits = field(default_factory=Limits)
    """Quotas."""
    network: Network = field(default_factory=Network)
    """What it may reach; none of the local backends offers any."""
    user: str = "user"
    """Who runs commands and owns files unless a call says otherwise."""
    allow_files_only: bool = False
    """Accept a backend on which processes do not survive a pause."""

    def __post_init__(self) -> None:
        if self.on_timeout not in ("kill", "pause"):
            raise InputError(f"on_timeout = {self.on_timeout!r}: 'kill' or 'pause'")
        for name in ("timeout", "idle_pause"):
            _require_seconds(name, getattr(self, name))

    @property
    def life(self) -> dict[str, Any]:
        """What a started machine becomes this sandbox by; see the keeper's `commit`."""
        return {
            "timeout": self.timeout,
            "on_timeout": self.on_timeout,
            "idle_pause": self.idle_pause,
            "env": dict(self.env),
            "metadata": dict(self.metadata),
        }


@dataclass(frozen=True)
class ProcessRequest(Request):
    """A command to start: the options of `Sandbox.start` and `Sandbox.run`."""

    cmd: Command
    """A string for the shell, a list for no shell."""
    cwd: str | None = None
    """Folder to start in; the user's home without one."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the sandbox's environment."""
    user: str | None = None
    """Whose rights it has; the sandbox's `user` without one."""
    timeout: float | None = None
    """Seconds after which it and everything it started is killed."""
    stdin: bool = False
    """Whether `Process.send` will be used; otherwise its input is empty."""
    tty: tuple[int, int] | None = None
    """(rows, columns) of a terminal to give it."""
    detach: bool = False
    """It outlives this connection; otherwise letting go of it kills it."""
    tag: str | None = None
    """A name to `attach` to it by."""
    output_limit: int | None = None
    """Bytes of output after which it is killed with reason `output_limit`."""
    max_output: int = MAX_OUTPUT
    """Bytes of each stream that its Result keeps."""

    def __post_init__(self) -> None:
        if not self.cmd:
            raise InputError("an empty command")
        _require_seconds("timeout", self.timeout)
        if self.tty and not all(0 < number < 1 << 16 for number in self.tty):
            raise InputError(f"tty = {self.tty!r}: (rows, columns), each from 1 to 65535")

    def params(self) -> dict[str, Any]:
        """What the agent is told."""
        told = {**asdict(self), "env": dict(self.env)}
        del told["max_output"]
        return told


def _require_seconds(name: str, value: float | None) -> None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise InputError(f"{name} = {value!r}: a positive number of seconds, or None")
