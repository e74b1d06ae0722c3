"""Creating, resuming, forking and snapshotting the sandboxes of one home. Any process may have one.

A Pool holds no truth of its own: the records on disk and the locks of the keepers do, so a killed
manager loses nothing and two managers cannot disagree.
"""

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openk3.errors import (
    BackendError,
    ConflictError,
    InputError,
    NotFoundError,
    OpenK3Error,
)
from openk3.sandbox import events, recovery, stock
from openk3.sandbox.client import Connection
from openk3.sandbox.forking import Copy, children
from openk3.sandbox.requests import SandboxRequest
from openk3.sandbox.starting import Starter
from openk3.sandbox.store import gc, snapshots
from openk3.sandbox.store.home import Home, new_id
from openk3.sandbox.store.records import BoxRecord, SnapshotRecord

ASK_TIMEOUT_S = 15.0
KILL_TIMEOUT_S = 60.0


class Pool:
    """The sandboxes below one home folder."""

    def __init__(
        self,
        home: Home | str | Path | None = None,
        *,
        max_running: int = 64,
        prewarm: int = 0,
        max_layers: int = 24,
        at_once: int | None = None,
    ) -> None:
        self.home = home if isinstance(home, Home) else Home(home)
        self.starter = Starter(
            self.home, max_running=max_running, max_layers=max_layers, at_once=at_once
        )
        self._ready = stock.Ready(self.starter, prewarm)
        self._chores: set[asyncio.Task[Any]] = set()

    # -- new sandboxes ----------------------------------------------------------------------

    async def create(self, request: SandboxRequest, backend: str) -> tuple[BoxRecord, Connection]:
        """A new sandbox from a template or a snapshot.

        Raises OpenK3Error; then nothing is left behind.
        """
        record = BoxRecord(
            id=new_id(),
            backend=backend,
            template=request.template,
            state="running",
            limits=asdict(request.limits),
            user=request.user,
            allow_files_only=request.allow_files_only,
        )
        kind = (request.template, backend, asdict(request.limits), request.user)
        with self.starter.room([record.id]):
            begun = self._ready.take(kind)
            record, connection = begun or (record, await self.starter.begin(record))
            with self.home.using():
                fields = {**request.life, "created": time.time()}
                await self.starter.commit(record, connection, fields)
        if self._ready.count:
            self._chore(self._ready.refill(kind))
        return record, connection

    async def warm(self, template: str = "python", backend: str = "gvisor") -> str:
        """Keep a freshly started machine of a template as an image; creations restore it."""
        return await stock.make_warm(self, template, backend)

    def _chore(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def close(self) -> None:
        """Let machines nobody asked for yet go. Sandboxes stay as they are."""
        for task in list(self._chores):
            task.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await self._ready.close()
        await asyncio.to_thread(self.starter.close)

    # -- existing sandboxes -----------------------------------------------------------------

    def record(self, box_id: str) -> BoxRecord:
        """The record with its true state. Raises NotFoundError."""
        return recovery.settle(self.home, box_id)

    async def connect(self, box_id: str, timeout: float | None = None) -> Connection:
        """To a running sandbox, resuming a paused one first."""
        record = self.record(box_id)
        if record.state == "paused":
            try:
                return await self.resume(box_id, timeout)
            except ConflictError:
                record = self.record(box_id)  # somebody else resumed it at the same time
                if record.state == "paused":
                    raise
        if record.state == "lost":
            raise NotFoundError(f"sandbox {box_id} has ended: {record.reason}")
        try:
            return await Connection.to_box(self.home.box(box_id))
        except ConflictError:
            if self.record(box_id).state != "paused":
                raise
        return await self.resume(box_id, timeout)  # it was pausing just now

    async def resume(
        self, box_id: str, timeout: float | None = None, *, previous: bool = False
    ) -> Connection:
        """Start a paused sandbox where it stopped; `previous` takes the generation before that.

        Raises CheckpointError when the image is damaged (the sandbox stays paused), NotFoundError.
        """
        record = self.record(box_id)
        with self.starter.room([box_id]):
            if previous:
                self._step_back(record)
            connection = await self._resume(record)
        if timeout is not None:
            await connection.call("set_timeout", timeout=timeout)
        self._chore(asyncio.to_thread(gc.collect, self.home))
        return connection

    async def _resume(self, record: BoxRecord) -> Connection:
        """A restore may fail by chance, rarely; the image is then as good as before."""
        try:
            with self.home.using():
                return await self.starter.boot(record, "resume")
        except BackendError as error:
            events.emit(self.home, "resume_failed", record.id, reason=str(error))
        with self.home.using():
            return await self.starter.boot(record, "resume")

    def _step_back(self, record: BoxRecord) -> None:
        if not record.previous:
            raise NotFoundError(f"sandbox {record.id} has no previous generation")
        record.image, record.previous = record.previous, None
        record.save(BoxRecord.path(self.home, record.id))

    async def pause(self, box_id: str, *, memory: bool = True) -> dict[str, Any]:
        """Save and stop. Raises ConflictError when it is paused already or busy."""
        if self.record(box_id).state == "paused":
            raise ConflictError(f"sandbox {box_id} is paused already")
        connection = await Connection.to_box(self.home.box(box_id))
        try:
            return await connection.call("checkpoint", stay=False, memory=memory)
        finally:
            await connection.close()

    async def kill(self, box_id: str) -> bool:
        """End and delete a sandbox in any state. False when there is none."""
        end = time.monotonic() + KILL_TIMEOUT_S
        try:
            folder = self.home.box(box_id)
            while folder.exists():
                try:
                    if await self._ask_to_end(folder):
                        self._chore(asyncio.to_thread(gc.collect, self.home))
                    else:
                        await asyncio.to_thread(recovery.force_end, self.home, box_id)
                        await asyncio.to_thread(recovery.delete, self.home, box_id)
                    return True
                except ConflictError:  # somebody resumes it at the same time
                    if time.monotonic() > end:
                        raise
        except NotFoundError:
            return False  # its folder went while we looked
        return False

    async def _ask_to_end(self, folder: Path) -> bool:
        """False when no keeper listens, or it does not do it in time."""
        try:
            connection = await Connection.to_box(folder)
        except ConflictError:
            return False
        try:
            await asyncio.wait_for(connection.call("kill"), ASK_TIMEOUT_S)
        except (ConflictError, BackendError, TimeoutError):
            return False
        finally:
            await connection.close()
        return True

    async def fork(
        self, box_id: str, count: int, commit: dict[str, Any], *, memory: bool = True
    ) -> list[Copy | OpenK3Error]:
        """`count` copies of a running or paused sandbox; each result is a copy or its error."""
        if count < 1:
            raise InputError(f"fork: count = {count}: at least 1 is needed")
        ids = [new_id() for _ in range(count)]
        with self.home.using(), self.starter.room(ids):
            parent = self.record(box_id)
            if parent.state != "running":
                return await children(self.starter, parent, ids, commit)
            connection = await Connection.to_box(self.home.box(box_id))
            try:
                call = connection.open("checkpoint", stay=True, memory=memory)
                _, announced = await anext(call)
                parent.image = announced["image"]
                back = asyncio.ensure_future(call.result())  # the parent starts beside its copies
                copies = await children(self.starter, parent, ids, commit)
                try:
                    await back
                except OpenK3Error:
                    for copy in copies:
                        if isinstance(copy, tuple):
                            await self.kill(copy[0].id)
                    raise
                return copies
            finally:
                await connection.close()

    # -- snapshots --------------------------------------------------------------------------

    async def snapshot(
        self, box_id: str, name: str | None = None, *, memory: bool = True
    ) -> SnapshotRecord:
        """An immutable copy of a sandbox's state; the sandbox goes on as it was."""
        with self.home.using():
            record = self.record(box_id)
            if record.state == "running":
                connection = await Connection.to_box(self.home.box(box_id))
                try:
                    made = await connection.call("checkpoint", stay=True, memory=memory)
                finally:
                    await connection.close()
                record.image = made["image"]
            if not record.image or record.state == "lost":
                raise NotFoundError(f"sandbox {box_id} has ended: {record.reason}")
            saved = await asyncio.to_thread(snapshots.save, self.home, record, name, memory)
        events.emit(self.home, "snapshot", box_id, snapshot=saved.id)
        await asyncio.to_thread(gc.collect, self.home)
        return saved

    def snapshots(self) -> list[SnapshotRecord]:
        """All snapshots, oldest first."""
        return snapshots.every(self.home)

    def find_snapshot(self, name: str) -> SnapshotRecord:
        """By id, or the newest of a name. Raises NotFoundError."""
        return snapshots.find(self.home, name)

    def delete_snapshot(self, name: str) -> None:
        """Sandboxes made from it are unaffected. Raises NotFoundError."""
        snapshots.delete(self.home, name)
