"""What a Pool keeps ready: the image of a freshly started machine, and machines nobody has yet."""

import asyncio
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from openk3.errors import OpenK3Error
from openk3.sandbox import engines
from openk3.sandbox.client import Connection
from openk3.sandbox.store.home import Home, new_id
from openk3.sandbox.store.records import BoxRecord, ImageManifest
from openk3.sandbox.templates import catalog, runtime
from openk3.sandbox.types import Limits

if TYPE_CHECKING:
    from openk3.sandbox.pool import Pool
    from openk3.sandbox.starting import Starter


def warm_image(home: Home, template_id: str) -> str | None:
    """The image that creations from a template may restore instead of booting."""
    file = home.templates / f"{template_id}.warm"
    return file.read_text().strip() if file.exists() else None


def drop_warm_image(home: Home, template_id: str) -> None:
    (home.templates / f"{template_id}.warm").unlink(missing_ok=True)


async def make_warm(pool: "Pool", template: str, backend: str) -> str:
    """See `Pool.warm`."""
    template_id = await asyncio.to_thread(lambda: catalog.get(pool.home, template).id)
    image = warm_image(pool.home, template_id)
    if image and await asyncio.to_thread(_fits, pool.home, image):
        return template_id
    record = BoxRecord(new_id(), backend, template_id, "running", limits=asdict(Limits()))
    with pool.home.using():
        connection = await pool.starter.boot(record)
        await pool.starter.commit(record, connection, {"created": time.time()})
        saved = await connection.call("checkpoint", stay=False)
        (pool.home.templates / f"{template_id}.warm").write_text(saved["image"] + "\n")
    await connection.close()
    await pool.kill(record.id)
    return template_id


def _fits(home: Home, image: str) -> bool:
    try:
        manifest = ImageManifest.load(ImageManifest.path(home, image))
    except OpenK3Error:
        return False
    engine = engines.find(manifest.backend).version
    here = (engine, engines.cpu_fingerprint(), runtime.runtime_id())
    return (manifest.engine, manifest.cpu, manifest.runtime) == here


class Ready:
    """Started machines of the kinds that were asked for before. They end with their Pool."""

    def __init__(self, starter: "Starter", count: int) -> None:
        self.starter, self.count = starter, count
        self.waiting: list[tuple[Any, BoxRecord, Connection]] = []

    def take(self, kind: Any) -> tuple[BoxRecord, Connection] | None:
        """One of this kind that is still alive."""
        for number, (other, record, connection) in enumerate(self.waiting):
            if other == kind and not connection.closed:
                del self.waiting[number]
                return record, connection
        return None

    async def refill(self, kind: Any) -> None:
        """Start machines of this kind until there are enough."""
        template, backend, limits, user = kind
        self.waiting = [item for item in self.waiting if not item[2].closed]
        while sum(other == kind for other, _, _ in self.waiting) < self.count:
            record = BoxRecord(new_id(), backend, template, "running", limits=limits, user=user)
            connection = await self.starter.begin(record)
            self.waiting.append((kind, record, connection))

    async def close(self) -> None:
        for _, _, connection in self.waiting:
            await connection.close()
        self.waiting.clear()
