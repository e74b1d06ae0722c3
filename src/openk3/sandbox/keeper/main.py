"""How a keeper begins: lock, namespaces, fork to be process 1, then asyncio."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from openk3.errors import ConflictError, OpenK3Error
from openk3.sandbox import frames
from openk3.sandbox.keeper import namespaces
from openk3.sandbox.store.home import BoxLock, Home, remove_tree, start_time
from openk3.sandbox.store.records import BoxRecord

LOCK_WAIT_S = 10.0


def become(order: dict[str, Any], creation: socket.socket) -> None:
    """Start the sandbox that `order` (see `launch.py`) describes; `creation` is its creator."""
    try:
        _become_keeper(order, creation)
    except (OpenK3Error, OSError) as error:
        if order["mode"] == "new":
            with suppress(OpenK3Error, OSError):
                home = Home(order["home"])
                remove_tree(home.box(order["id"]), home.path)
        value = {"kind": "conflict", "message": f"cannot start a sandbox here: {error}"}
        with suppress(OSError):  # a creator that left needs no reason
            creation.sendall(frames.pack_json(0, frames.ERROR, value))


def _become_keeper(order: dict[str, Any], creation: socket.socket) -> None:
    home = Home(order["home"])
    folder = home.box(order["id"])
    if order["mode"] == "new":
        folder.mkdir()
    resume = order["mode"] == "resume"
    lock = BoxLock(folder, LOCK_WAIT_S, (lambda: _runs(folder)) if resume else None)
    record = BoxRecord(**order["record"])
    if not resume:
        (folder / "from").write_text(record.image or "")  # until there is a record to say it
    else:
        record = BoxRecord.load(folder / "box.json")
        if record.state == "lost" or not record.image:
            raise ConflictError(f"sandbox {record.id} cannot be resumed: {record.reason}")
    root = namespaces.unshare_all()
    proc = os.open("/proc", os.O_RDONLY)  # this one counts as the world outside does
    if child := os.fork():
        (folder / "pid").write_text(f"{child} {start_time(child, proc)}")
        os._exit(0)  # the lock lives on in the child
    os.close(proc)
    namespaces.set_process_name("k3-keeper")
    namespaces.mount("proc", "/proc", "proc", namespaces.MS_NOSUID | namespaces.MS_NODEV)
    os.umask(0o022)
    _serve(home, record, order, creation, root, lock)


def _runs(folder: Path) -> bool:
    """Whether the keeper that has the lock is no longer one that pauses, but another's resume."""
    return BoxRecord.load(folder / "box.json").state == "running"


def _serve(
    home: Home,
    record: BoxRecord,
    order: dict[str, Any],
    creation: socket.socket,
    root: bool,
    lock: BoxLock,
) -> None:
    import asyncio

    from openk3.sandbox.keeper.keeper import Keeper
    from openk3.sandbox.keeper.machine import Plan

    async def live() -> None:
        keeper = Keeper(home, record, Plan(**order["plan"]), order["mode"], root)
        await keeper.run(creation)

    asyncio.run(live())
    lock.release()
