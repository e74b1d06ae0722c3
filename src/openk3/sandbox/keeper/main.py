"""How a keeper process begins: lock, namespaces, fork to be process 1, then asyncio."""

import json
import os
import socket
import sys
from typing import Any

from openk3.errors import ConflictError, OpenK3Error
from openk3.sandbox import frames
from openk3.sandbox.keeper import namespaces
from openk3.sandbox.store.home import BoxLock, Home
from openk3.sandbox.store.records import BoxRecord

LOCK_WAIT_S = 10.0


def main() -> None:
    """`argv[1]` is the JSON that `launch.py` wrote; standard input is the creator's socket."""
    order = json.loads(sys.argv[1])
    creation = socket.socket(fileno=os.dup(0))
    try:
        _become_keeper(order, creation)
    except (OpenK3Error, OSError) as error:
        value = {"kind": "conflict", "message": f"cannot start a sandbox here: {error}"}
        creation.sendall(frames.pack_json(0, frames.ERROR, value))
        raise SystemExit(1) from error


def _become_keeper(order: dict[str, Any], creation: socket.socket) -> None:
    home = Home(order["home"])
    folder = home.box(order["id"])
    if order["mode"] == "new":
        folder.mkdir()
    lock = BoxLock(folder, LOCK_WAIT_S)
    record = BoxRecord(**order["record"])
    if order["mode"] == "resume":
        record = BoxRecord.load(folder / "box.json")
        if record.state == "lost" or not record.image:
            raise ConflictError(f"sandbox {record.id} cannot be resumed: {record.reason}")
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    root = namespaces.unshare_all()
    if child := os.fork():
        (folder / "pid").write_text(str(child))
        os._exit(0)  # the lock lives on in the child
    os.setsid()
    namespaces.set_process_name("k3-keeper")
    namespaces.mount("proc", "/proc", "proc", namespaces.MS_NOSUID | namespaces.MS_NODEV)
    os.umask(0o022)
    _serve(home, record, order, creation, root, lock)


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
