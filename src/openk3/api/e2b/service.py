"""What the routes share: the pool, open sandboxes, tokens, and errors as HTTP."""

import hashlib
import hmac
import time
from datetime import UTC, datetime
from typing import Any

from openk3.api.auth import ApiKeys, own_key
from openk3.errors import (
    BackendError,
    ConflictError,
    DeniedError,
    InputError,
    LimitError,
    NotFoundError,
    OpenK3Error,
    StorageError,
)
from openk3.sandbox.local import LocalSandbox
from openk3.sandbox.pool import Pool
from openk3.sandbox.store.records import BoxRecord
from openk3.sandbox.types import Capabilities, State

ENVD_VERSION = "0.6.1"  # the newest level of the in-sandbox protocol that is served here
STATUS: tuple[tuple[type[OpenK3Error], int], ...] = (
    (NotFoundError, 404),
    (ConflictError, 409),
    (LimitError, 429),
    (DeniedError, 403),
    (StorageError, 507),
    (BackendError, 501),
    (InputError, 400),
)
NO_END = 4102444800.0  # what "never" is called in a protocol that has no word for it (year 2100)


def status_of(error: OpenK3Error) -> int:
    """The HTTP status that stands for an error class."""
    return next((status for kind, status in STATUS if isinstance(error, kind)), 500)


class NotRunningError(Exception):
    """An in-sandbox call for a sandbox that does not run; the proxy of the protocol says 502."""


class Service:
    """State of one server."""

    def __init__(self, pool: Pool, keys: ApiKeys, backend: str, capabilities: Capabilities) -> None:
        self.pool, self.keys, self.backend = pool, keys, backend
        self.capabilities = capabilities
        self.seed = own_key(pool.home.path / "token.seed", "").encode()
        self.open: dict[str, LocalSandbox] = {}

    def token(self, sandbox_id: str, purpose: str = "envd") -> str:
        """Per sandbox and not to be guessed from another's; forks have ids and so tokens."""
        word = f"{purpose}:{sandbox_id}".encode()
        return hmac.new(self.seed, word, hashlib.sha256).hexdigest()

    def sandbox(self, sandbox_id: str) -> LocalSandbox:
        """A handle on an existing sandbox. Raises NotFoundError."""
        record = self.pool.record(sandbox_id)
        if record.state == State.LOST:
            raise NotFoundError(f"sandbox {sandbox_id} not found: {record.reason}")
        if sandbox_id not in self.open:
            self.open[sandbox_id] = LocalSandbox(self.pool, record, self.capabilities)
        handle = self.open[sandbox_id]
        handle.record = record
        return handle

    def running(self, sandbox_id: str | None) -> LocalSandbox:
        """For calls that go inside. Raises NotRunningError."""
        try:
            handle = self.sandbox(sandbox_id or "")
        except NotFoundError as error:
            raise NotRunningError(f"The sandbox was not found: {error}") from error
        if handle.record.state != State.RUNNING:
            raise NotRunningError(f"The sandbox was not found: it is {handle.record.state}")
        return handle

    async def forget(self, sandbox_id: str) -> None:
        """Close our connection to a sandbox that ended or paused."""
        if handle := self.open.pop(sandbox_id, None):
            await handle.close()

    async def close(self) -> None:
        """Let go of every sandbox; they live on."""
        for sandbox_id in list(self.open):
            await self.forget(sandbox_id)
        await self.pool.close()

    # -- the protocol's words ---------------------------------------------------------------

    def created(self, record: BoxRecord) -> dict[str, Any]:
        """What creations, connects and forks answer."""
        return {
            "templateID": record.template,
            "sandboxID": record.id,
            "clientID": "local",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.token(record.id),
            "trafficAccessToken": self.token(record.id, "traffic"),
            "domain": None,
        }

    def detail(self, record: BoxRecord) -> dict[str, Any]:
        """One sandbox as listings and `getInfo` show it."""
        return {
            "templateID": record.template,
            "sandboxID": record.id,
            "clientID": "local",
            "startedAt": _stamp(record.created),
            "endAt": _stamp(record.deadline or (NO_END if record.state == "running" else None)),
            "cpuCount": max(1, round(record.limits.get("cpus", 1))),
            "memoryMB": record.limits.get("memory_mb", 0),
            "diskSizeMB": record.limits.get("disk_mb", 0),
            "state": record.state,
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.token(record.id),
            "metadata": record.metadata,
            "allowInternetAccess": False,
            "lifecycle": {
                "autoResume": False,
                "onTimeout": "pause" if record.on_timeout == "pause" else "kill",
            },
        }


def _stamp(when: float | None) -> str:
    return datetime.fromtimestamp(when or time.time(), UTC).isoformat().replace("+00:00", "Z")
