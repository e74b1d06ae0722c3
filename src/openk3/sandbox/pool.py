"""Creating, resuming, forking and snapshotting the sandboxes of one home. Any process may have one.

A Pool holds no truth of its own: the records on disk and the locks of the keepers do, so a killed
manager loses nothing and two managers cannot disagree.
"""

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openk3.errors import (
    BackendError,
    CheckpointError,
    ConflictError,
    InputError,
    LimitError,
    NotFoundError,
    OpenK3Error,
)
from openk3.sandbox import engines, events, recovery, stock
from openk3.sandbox.client import Connection
from openk3.sandbox.launch import Launcher
from openk3.sandbox.store import gc, snapshots
from openk3.sandbox.store.home import Home, new_id
from openk3.sandbox.store.records import BoxRecord, SnapshotRecord
from openk3.sandbox.templates import catalog, runtime
from openk3.sandbox.types import Limits

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
        self.max_running, self.max_layers = max_running, max_layers
        self._starting = asyncio.Semaphore(at_once or max(2, os.cpu_count() or 2) * 2)
        self._launcher = Launcher(self.home)
        self._ready = stock.Ready(self, prewarm)
        self._chores: set[asyncio.Task[Any]] = set()

    # -- starting ---------------------------------------------------------------------------

    def _plan(self, record: BoxRecord) -> dict[str, Any]:
        engine = engines.find(record.backend)
        template = catalog.get(self.home, record.template)
        layer = runtime.build(self.home.runtime)
        return {
            "backend": record.backend,
            "program": engine.program,
            "engine": engine.version,
            "cpu": engines.cpu_fingerprint(),
            "template": template.id,
            "template_root": str(template.root),
            "runtime": layer.name,
            "runtime_root": str(layer),
            "agent": runtime.agent_argv(),
            "group": recovery.group_name(self.home, record.id),
            "max_layers": self.max_layers,
            "limits": record.limits,
        }

    async def boot(self, record: BoxRecord, mode: str = "new") -> Connection:
        """A keeper for a new or a paused sandbox, once its machine answers."""
        async with self._starting:
            plan = await asyncio.to_thread(self._plan, record)
            record.template = plan["template"]
            connection, _ = await self._launcher.launch(mode, record.id, asdict(record), plan)
            return connection

    def _require_room(self, count: int = 1) -> None:
        running = sum(record.state == "running" for record in recovery.records(self.home))
        if running + count > self.max_running:
            raise LimitError(
                f"{running} sandboxes run and at most {self.max_running} may, so {count} more "
                "cannot start; pause or kill some"
            )

    async def create(
        self,
        template: str,
        backend: str,
        *,
        limits: Limits,
        commit: dict[str, Any],
        user: str = "user",
        allow_files_only: bool = False,
    ) -> tuple[BoxRecord, Connection]:
        """A new sandbox from a template or a snapshot.

        `commit` holds metadata, env, timeout, on_timeout, idle_pause. Raises OpenK3Error; then
        nothing is left behind.
        """
        self._require_room()
        record = BoxRecord(
            id=new_id(),
            backend=backend,
            template=template,
            state="running",
            limits=asdict(limits),
            user=user,
            allow_files_only=allow_files_only,
        )
        kind = (template, backend, asdict(limits), user)
        record, connection = self._ready.take(kind) or (record, await self.begin(record))
        with self.home.using():
            await self.commit(record, connection, {**commit, "created": time.time()})
        if self._ready.count:
            self._chore(self._ready.refill(kind))
        return record, connection

    async def begin(self, record: BoxRecord) -> Connection:
        """Boot a snapshot, the warm image or nothing; a stale or damaged warm image is dropped."""
        with self.home.using():
            self._choose_image(record)
            warm = record.image is not None and not record.own_image
            try:
                return await self.boot(record)
            except CheckpointError as error:
                if not warm:
                    raise
                events.emit(self.home, "warm_image_dropped", record.id, reason=str(error))
                stock.drop_warm_image(self.home, record.template)
                record.image = None
                record.id = new_id()
                return await self.boot(record)

    async def commit(
        self, record: BoxRecord, connection: Connection, fields: dict[str, Any]
    ) -> None:
        """Adopt a machine that was begun; on any failure it ends, as nobody will learn its id."""
        try:
            value = await connection.call("commit", **fields)
        except BaseException:
            if not connection.closed:
                connection.open("kill")
            await connection.close()
            raise
        for name in vars(record):
            setattr(record, name, value[name])

    def _choose_image(self, record: BoxRecord) -> None:
        """Where a new sandbox starts: a snapshot's image, the warm image, or a cold boot."""
        self.require_backend(record.template, record.backend)
        if saved := self._snapshot_called(record.template):
            record.image, record.own_image = saved.image, True
            record.template = saved.template
            record.env = {**saved.env, **record.env}
            return
        record.template = catalog.get(self.home, record.template).id
        if record.backend == "gvisor":
            record.image = stock.warm_image(self.home, record.template)

    def require_backend(self, template: str, backend: str) -> None:
        """Raise BackendError if `template` is a snapshot and another backend made it."""
        saved = self._snapshot_called(template)
        if saved is not None and saved.backend != backend:
            raise BackendError(
                f"snapshot {saved.id} was made by backend {saved.backend}, not {backend}"
            )

    def _snapshot_called(self, name: str) -> SnapshotRecord | None:
        """By id or name; a template of the same name comes first."""
        if not name.startswith("snap"):
            with suppress(NotFoundError):
                catalog.get(self.home, name)
                return None
        with suppress(NotFoundError):
            return self.find_snapshot(name)
        return None

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
        await asyncio.to_thread(self._launcher.close)

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
        self._require_room()
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
                return await self.boot(record, "resume")
        except BackendError as error:
            events.emit(self.home, "resume_failed", record.id, reason=str(error))
        with self.home.using():
            return await self.boot(record, "resume")

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
    ) -> list[tuple[BoxRecord, Connection] | OpenK3Error]:
        """`count` copies of a running or paused sandbox; each result is a copy or its error."""
        if count < 1:
            raise InputError(f"fork: count = {count}: at least 1 is needed")
        self._require_room(count)
        with self.home.using():
            parent = self.record(box_id)
            if parent.state != "running":
                return await self._children(parent, count, commit)
            connection = await Connection.to_box(self.home.box(box_id))
            try:
                call = connection.open("checkpoint", stay=True, memory=memory)
                _, announced = await anext(call)
                parent.image = announced["image"]
                back = asyncio.ensure_future(call.result())  # the parent starts beside its copies
                copies = await self._children(parent, count, commit)
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

    async def _children(
        self, parent: BoxRecord, count: int, commit: dict[str, Any]
    ) -> list[tuple[BoxRecord, Connection] | OpenK3Error]:
        if parent.state == "lost" or not parent.image:
            raise NotFoundError(f"sandbox {parent.id} has ended: {parent.reason}")
        copies = [self._fork_one(parent, commit) for _ in range(count)]
        found = await asyncio.gather(*copies, return_exceptions=True)
        results: list[tuple[BoxRecord, Connection] | OpenK3Error] = []
        for item in found:
            if isinstance(item, BaseException) and not isinstance(item, OpenK3Error):
                raise item
            results.append(item)
        return results

    async def _fork_one(
        self, parent: BoxRecord, commit: dict[str, Any]
    ) -> tuple[BoxRecord, Connection]:
        record = BoxRecord(
            id=new_id(),
            backend=parent.backend,
            template=parent.template,
            state="running",
            image=parent.image,
            own_image=True,
            limits=parent.limits,
            env=parent.env,
            user=parent.user,
            allow_files_only=parent.allow_files_only,
        )
        connection = await self.boot(record)
        fields = {"metadata": parent.metadata, "on_timeout": parent.on_timeout, **commit}
        await self.commit(record, connection, {**fields, "created": time.time()})
        return record, connection

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
