"""Creating, resuming, forking and snapshotting the sandboxes of one home. Any process may have one.

A Pool holds no truth of its own: the records on disk and the locks of the keepers do, so a killed
manager loses nothing and two managers cannot disagree.
"""

import asyncio
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openk3.errors import (
    BackendError,
    CheckpointError,
    ConflictError,
    LimitError,
    NotFoundError,
    OpenK3Error,
)
from openk3.sandbox import engines, events, recovery
from openk3.sandbox.client import Connection
from openk3.sandbox.launch import Launcher
from openk3.sandbox.store import gc, pages
from openk3.sandbox.store.home import Home, new_id
from openk3.sandbox.store.records import BoxRecord, ImageManifest, SnapshotRecord
from openk3.sandbox.templates import catalog, runtime
from openk3.sandbox.types import Limits


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
        self.max_running, self.prewarm = max_running, prewarm
        self.max_layers = max_layers
        self._starting = asyncio.Semaphore(at_once or max(2, os.cpu_count() or 2) * 2)
        self._launcher = Launcher(self.home)
        self._ready: list[tuple[Any, BoxRecord, Connection]] = []
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

    async def _boot(self, record: BoxRecord, mode: str = "new") -> Connection:
        async with self._starting:
            plan = await asyncio.to_thread(self._plan, record)
            record.template = plan["template"]
            connection, _ = await self._launcher.launch(mode, record.id, asdict(record), plan)
            return connection

    def _require_room(self, count: int = 1) -> None:
        running = sum(record.state == "running" for record in recovery.records(self.home))
        if running + count > self.max_running:
            raise LimitError(
                f"{running} sandboxes run and at most {self.max_running} may; pause or kill some"
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
        key = (template, backend, asdict(limits), user)
        with self.home.using():
            taken = self._take_ready(key)
            if taken:
                record, connection = taken
            else:
                self._choose_image(record)
                connection = await self._boot_or_cold(record)
            final = {**commit, "created": time.time()}
            await self._commit(record, connection, final)
        if self.prewarm:
            self._chore(self._refill(key, record))
        return record, connection

    async def _boot_or_cold(self, record: BoxRecord) -> Connection:
        """From the warm image if there is one; a stale or damaged one is dropped."""
        warm = record.image is not None and not record.own_image
        try:
            return await self._boot(record)
        except CheckpointError as error:
            if not warm:
                raise
            events.emit(self.home, "warm_image_dropped", record.id, reason=str(error))
            (self.home.templates / f"{record.template}.warm").unlink(missing_ok=True)
            record.image = None
            record.id = new_id()
            return await self._boot(record)

    async def _commit(
        self, record: BoxRecord, connection: Connection, fields: dict[str, Any]
    ) -> None:
        try:
            value = await connection.call("commit", **fields)
        except BaseException:
            if not connection.closed:
                connection.open("kill")  # nobody will learn the id of what may be committed
            await connection.close()
            raise
        for name in vars(record):
            setattr(record, name, value[name])

    def _choose_image(self, record: BoxRecord) -> None:
        """Where a new sandbox starts: a snapshot's image, the warm image, or a cold boot."""
        snapshot = SnapshotRecord.path(self.home, record.template)
        if record.template.startswith("snap") and snapshot.exists():
            saved = SnapshotRecord.load(snapshot)
            if saved.backend != record.backend:
                raise BackendError(
                    f"snapshot {saved.id} was made by backend {saved.backend}, not {record.backend}"
                )
            record.image, record.own_image = saved.image, True
            record.template = saved.template
            record.env = {**saved.env, **record.env}
            return
        record.template = catalog.get(self.home, record.template).id
        warm = self.home.templates / f"{record.template}.warm"
        if record.backend == "gvisor" and warm.exists():
            record.image = warm.read_text().strip()

    async def warm(self, template: str = "python", backend: str = "gvisor") -> str:
        """Keep a freshly started machine of a template as an image; creations restore it."""
        template_id = await asyncio.to_thread(lambda: catalog.get(self.home, template).id)
        file = self.home.templates / f"{template_id}.warm"
        if file.exists() and await asyncio.to_thread(self._warm_fits, file.read_text().strip()):
            return template_id
        record = BoxRecord(new_id(), backend, template_id, "running", limits=asdict(Limits()))
        with self.home.using():
            connection = await self._boot(record)
            await self._commit(record, connection, {"created": time.time()})
            saved = await connection.call("checkpoint", stay=False)
            file.write_text(saved["image"] + "\n")
        await connection.close()
        await self.kill(record.id)
        return template_id

    def _warm_fits(self, image: str) -> bool:
        try:
            manifest = ImageManifest.load(ImageManifest.path(self.home, image))
        except OpenK3Error:
            return False
        engine = engines.find(manifest.backend).version
        here = (engine, engines.cpu_fingerprint(), runtime.runtime_id())
        return (manifest.engine, manifest.cpu, manifest.runtime) == here

    def _take_ready(self, key: Any) -> tuple[BoxRecord, Connection] | None:
        for number, (other, record, connection) in enumerate(self._ready):
            if other == key and not connection.closed:
                del self._ready[number]
                return record, connection
        return None

    async def _refill(self, key: Any, like: BoxRecord) -> None:
        template, backend, limits, user = key
        while sum(other == key for other, _, _ in self._ready) < self.prewarm:
            record = BoxRecord(new_id(), backend, template, "running", limits=limits, user=user)
            with self.home.using():
                self._choose_image(record)
                connection = await self._boot_or_cold(record)
            self._ready.append((key, record, connection))
        del like

    def _chore(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def close(self) -> None:
        """Let machines nobody asked for yet go. Sandboxes stay as they are."""
        for task in list(self._chores):
            task.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        for _, _, connection in self._ready:
            await connection.close()
        self._ready.clear()
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
                return await self._boot(record, "resume")
        except BackendError as error:
            events.emit(self.home, "resume_failed", record.id, reason=str(error))
        with self.home.using():
            return await self._boot(record, "resume")

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
        try:
            folder = self.home.box(box_id)
            if not folder.exists():
                return False
            try:
                connection = await Connection.to_box(folder)
                try:
                    await asyncio.wait_for(connection.call("kill"), 15.0)
                finally:
                    await connection.close()
                self._chore(asyncio.to_thread(gc.collect, self.home))
                return True
            except (ConflictError, TimeoutError):
                await asyncio.to_thread(recovery.force_end, self.home, box_id)
            await asyncio.to_thread(recovery.delete, self.home, box_id)
        except NotFoundError:
            return False
        return True

    async def fork(
        self, box_id: str, count: int, commit: dict[str, Any], *, memory: bool = True
    ) -> list[tuple[BoxRecord, Connection] | OpenK3Error]:
        """`count` copies of a running or paused sandbox; each result is a copy or its error."""
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
        connection = await self._boot(record)
        fields = {"metadata": parent.metadata, "on_timeout": parent.on_timeout, **commit}
        await self._commit(record, connection, {**fields, "created": time.time()})
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
            saved = SnapshotRecord(
                id=new_id("snap"),
                name=name,
                image=record.image,
                sandbox_id=box_id,
                backend=record.backend,
                template=record.template,
                limits=record.limits,
                env=record.env,
                user=record.user,
                created=time.time(),
                memory=memory,
            )
            saved.save(SnapshotRecord.path(self.home, saved.id))
            await asyncio.to_thread(self._pack, record.image)
        events.emit(self.home, "snapshot", box_id, snapshot=saved.id)
        await asyncio.to_thread(gc.collect, self.home)
        return saved

    def _pack(self, image: str) -> None:
        """Move a memory image into the page store, where equal pages are kept once."""
        path = ImageManifest.path(self.home, image)
        manifest = ImageManifest.load(path)
        if manifest.packed or not manifest.files:
            return
        files = [path.parent / file for file in manifest.files]
        pages.pack(self.home.pages, image, files)
        manifest.packed = True
        manifest.save(path)  # the plain files go when nobody can be reading them: in gc.collect

    def snapshots(self) -> list[SnapshotRecord]:
        """All snapshots, oldest first."""
        found = [SnapshotRecord.load(file) for file in self.home.snapshots.glob("*.json")]
        return sorted(found, key=lambda saved: saved.created)

    def find_snapshot(self, name: str) -> SnapshotRecord:
        """By id, or the newest of a name. Raises NotFoundError."""
        for saved in reversed(self.snapshots()):
            if name in (saved.id, saved.name):
                return saved
        raise NotFoundError(f"no snapshot {name!r}")

    def delete_snapshot(self, name: str) -> None:
        """Sandboxes made from it are unaffected."""
        saved = self.find_snapshot(name)
        SnapshotRecord.path(self.home, saved.id).unlink()
        gc.collect(self.home)
