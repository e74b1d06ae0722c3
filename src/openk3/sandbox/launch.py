"""Starting a keeper process and hearing that its machine answers."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openk3.errors import BackendError
from openk3.sandbox.client import Connection
from openk3.sandbox.store.home import Home

SOURCE_ROOT = Path(__file__).resolve().parents[2]  # the folder that holds `openk3`
START_TIMEOUT_S = 180.0

_START = (
    "import sys; sys.path.insert(0, {root!r}); from openk3.sandbox.keeper.main import main; main()"
)


async def launch(
    home: Home, mode: str, box_id: str, record: dict[str, Any], plan: dict[str, Any]
) -> tuple[Connection, dict[str, Any]]:
    """Start a keeper in `mode` "new" or "resume"; its connection and greeting.

    A new machine lives only as long as this connection until `commit` is called on it.
    Raises what the keeper reports, or BackendError when it says nothing.
    """
    order = {"home": str(home.path), "mode": mode, "id": box_id, "record": record, "plan": plan}
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    try:
        await asyncio.to_thread(_spawn, home, order, theirs)
    finally:
        theirs.close()
    ours.setblocking(False)
    connection = await Connection.over(ours)
    try:
        return connection, await connection.greet(START_TIMEOUT_S)
    except TimeoutError:
        await connection.close()
        raise BackendError(f"the sandbox did not start in {START_TIMEOUT_S:g} s") from None
    except BaseException:
        await connection.close()
        raise


def _spawn(home: Home, order: dict[str, Any], sock: socket.socket) -> None:
    start = _START.format(root=str(SOURCE_ROOT))
    argv = [sys.executable, "-I", "-S", "-X", "utf8", "-c", start, json.dumps(order)]
    environment = {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), "HOME": "/"}
    with open(home.path / "keeper.log", "ab") as log:
        subprocess.run(
            argv,
            stdin=sock.fileno(),
            stdout=log,
            stderr=log,
            env=environment,
            cwd="/",
            check=False,
            start_new_session=True,
        )


def as_plan(plan: Any) -> dict[str, Any]:
    """A `Plan` as JSON values."""
    return asdict(plan)
