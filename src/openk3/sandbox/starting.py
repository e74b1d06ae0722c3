"""From a record to a machine that answers: the plan of its keeper, its image, room for it."""

import asyncio
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from openk3.errors import BackendError, CheckpointError, LimitError, NotFoundError
from openk3.sandbox import engines, events, recovery, stock
from openk3.sandbox.client import Connection
from openk3.sandbox.launch import Launcher
from openk3.sandbox.store import snapshots
from openk3.sandbox.store.home import Home, new_id
from openk3.sandbox.store.records import BoxRecord, SnapshotRecord
from openk3.sandbox.templates import catalog, runtime


class Starter:
    """Starts the machines of one Pool: at most `max_running`, at most `at_once` at a time."""

    def __init__(
        self, home: Home, *, max_running: int, max_layers: int, at_once: int | None
    ) -> None:
        self.home = home
        self.max_running, self.max_layers = max_running, max_layers
        self._gate = asyncio.Semaphore(at_once or max(2, os.cpu_count() or 2) * 2)
        self._launcher = Launcher(home)
        self._starting: set[str] = set()

    @contextmanager
    def room(self, box_ids: Iterable[str]) -> Iterator[None]:
        """Places for these sandboxes while they start. Raises LimitError without them."""
        wanted = set(box_ids)
        running = {record.id for record in recovery.records(self.home) if record.state == "running"}
        taken = (running | self._starting) - wanted
        if len(taken) + len(wanted) > self.max_running:
            raise LimitError(
                f"{len(taken)} sandboxes run and at most {self.max_running} may, so "
                f"{len(wanted)} more cannot start; pause or kill some"
            )
        self._starting |= wanted
        try:
            yield
        finally:
            self._starting -= wanted

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
        async with self._gate:
            plan = await asyncio.to_thread(self._plan, record)
            record.template = plan["template"]
            connection, _ = await self._launcher.launch(mode, record.id, asdict(record), plan)
            return connection

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
            return snapshots.find(self.home, name)
        return None

    def close(self) -> None:
        """Let the process that starts keepers go; keepers stay."""
        self._launcher.close()
