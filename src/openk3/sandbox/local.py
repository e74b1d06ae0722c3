"""Sandboxes of this machine, on gVisor or bubblewrap, through their keepers."""

from typing import Any

from openk3.errors import ConflictError, OpenK3Error
from openk3.sandbox.client import Connection
from openk3.sandbox.files import Files
from openk3.sandbox.pool import Pool
from openk3.sandbox.process import Process
from openk3.sandbox.requests import ProcessRequest
from openk3.sandbox.sandbox import Sandbox
from openk3.sandbox.store.records import BoxRecord, SnapshotRecord
from openk3.sandbox.types import Capabilities, Info, Limits, SnapshotInfo, State

ISOLATION = {"gvisor": "gvisor", "bwrap": "namespace"}


class LocalSandbox(Sandbox):
    """A box of a Pool."""

    def __init__(
        self, pool: Pool, record: BoxRecord, capabilities: Capabilities, connection: Any = None
    ) -> None:
        self.pool, self.record, self.capabilities = pool, record, capabilities
        self.id = record.id
        self._connection: Connection | None = connection
        self.files = Files(self.connected)

    async def connected(self) -> Connection:
        """The open connection, made anew after a resume. Raises ConflictError when paused."""
        if self._connection is None or self._connection.closed:
            self._connection = await Connection.to_box(self.pool.home.box(self.id))
        return self._connection

    async def _start(self, request: ProcessRequest) -> Process:
        connection = await self.connected()
        return await Process.begin(connection, "start", request.params(), request.max_output)

    async def attach(self, *, pid: int | None = None, tag: str | None = None) -> Process:
        return await Process.begin(await self.connected(), "attach", {"pid": pid, "tag": tag})

    async def processes(self) -> list[dict[str, Any]]:
        return await (await self.connected()).call("jobs")

    @property
    def info(self) -> Info:
        return describe(self.record, self.capabilities)

    async def refresh(self) -> Info:
        self.record = self.pool.record(self.id)
        return self.info

    async def pause(self, *, memory: bool = True) -> None:
        await self.refresh()
        await self.pool.pause(self.id, memory=memory)
        await self.close()
        await self.refresh()

    async def resume(self, timeout: float | None = None) -> None:
        await self.close()
        if (await self.refresh()).state == State.RUNNING:
            raise ConflictError(f"sandbox {self.id} runs already")
        self._connection = await self.pool.resume(self.id, timeout)
        await self.refresh()

    async def fork(
        self, count: int = 1, *, timeout: float | None = 300.0, memory: bool = True
    ) -> list[Sandbox]:
        copies = await self.pool.fork(self.id, count, {"timeout": timeout}, memory=memory)
        made = [
            LocalSandbox(self.pool, record, self.capabilities, connection)
            for record, connection in (item for item in copies if isinstance(item, tuple))
        ]
        errors = [item for item in copies if isinstance(item, OpenK3Error)]
        if errors:
            for sandbox in made:
                await sandbox.kill()
            raise errors[0]
        await self.refresh()
        return list(made)

    async def snapshot(self, name: str | None = None, *, memory: bool = True) -> SnapshotInfo:
        saved = await self.pool.snapshot(self.id, name, memory=memory)
        await self.refresh()
        return snapshot_info(self.pool, saved)

    async def set_timeout(self, seconds: float | None) -> None:
        await (await self.connected()).call("set_timeout", timeout=seconds)
        await self.refresh()

    async def kill(self) -> bool:
        await self.close()
        return await self.pool.kill(self.id)

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None


def describe(record: BoxRecord, capabilities: Capabilities) -> Info:
    """A record as the public Info."""
    return Info(
        id=record.id,
        state=State(record.state),
        backend=record.backend,
        isolation=ISOLATION[record.backend],
        capabilities=capabilities,
        template=record.template,
        limits=Limits(**record.limits),
        metadata=record.metadata,
        env=record.env,
        created=record.created,
        deadline=record.deadline,
        on_timeout=record.on_timeout,
        generation=record.generation,
        reason=record.reason,
    )


def snapshot_info(pool: Pool, saved: SnapshotRecord) -> SnapshotInfo:
    """A record as the public SnapshotInfo; the size counts pages shared with others too."""
    folder = pool.home.images / saved.image
    size = sum(file.stat().st_size for file in folder.iterdir()) if folder.exists() else 0
    return SnapshotInfo(
        id=saved.id,
        name=saved.name,
        sandbox_id=saved.sandbox_id,
        created=saved.created,
        memory=saved.memory,
        size_bytes=size,
    )
