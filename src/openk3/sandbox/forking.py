"""Machines that go on from an image of another."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

from openk3.errors import NotFoundError, OpenK3Error
from openk3.sandbox.client import Connection
from openk3.sandbox.starting import Starter
from openk3.sandbox.store.records import BoxRecord

Copy = tuple[BoxRecord, Connection]


async def children(
    starter: Starter, parent: BoxRecord, box_ids: list[str], fields: dict[str, Any]
) -> list[Copy | OpenK3Error]:
    """A copy of the parent's image for each id, all at once; each result is a copy or its error.

    fields: what differs from the parent, as in `SandboxRequest.life`. Raises NotFoundError.
    """
    if parent.state == "lost" or not parent.image:
        raise NotFoundError(f"sandbox {parent.id} has ended: {parent.reason}")
    tasks = [asyncio.ensure_future(_child(starter, parent, box_id, fields)) for box_id in box_ids]
    try:
        return await asyncio.gather(*(_or_error(task) for task in tasks))
    except BaseException:  # nobody will learn of those that are there already
        for task in tasks:
            task.cancel()
        for made in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(made, tuple):
                made[1].open("kill")
                await made[1].close()
        raise


async def _or_error(copy: Awaitable[Copy]) -> Copy | OpenK3Error:
    try:
        return await copy
    except OpenK3Error as error:
        return error


async def _child(starter: Starter, parent: BoxRecord, box_id: str, fields: dict[str, Any]) -> Copy:
    record = BoxRecord(
        id=box_id,
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
    connection = await starter.boot(record)
    inherited = {"metadata": parent.metadata, "on_timeout": parent.on_timeout}
    await starter.commit(record, connection, {**inherited, **fields, "created": time.time()})
    return record, connection
