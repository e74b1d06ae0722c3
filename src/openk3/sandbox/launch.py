"""Starting keepers and hearing that their machines answer."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from openk3.errors import BackendError
from openk3.sandbox.client import Connection
from openk3.sandbox.store.home import Home

SOURCE_ROOT = Path(__file__).resolve().parents[2]  # the folder that holds `openk3`
START_TIMEOUT_S = 180.0

_START = (
    "import sys; sys.path.insert(0, {root!r}); sys.modules['ssl'] = None; "  # slow and not needed
    "from openk3.sandbox.keeper.nursery import serve; serve()"
)


class Launcher:
    """Starts keepers for one Pool, from a nursery process that it keeps."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.lock = threading.Lock()
        self.nursery: subprocess.Popen[bytes] | None = None
        self.orders: socket.socket | None = None

    async def launch(
        self, mode: str, box_id: str, record: dict[str, Any], plan: dict[str, Any]
    ) -> tuple[Connection, dict[str, Any]]:
        """Start a keeper in `mode` "new" or "resume"; its connection and greeting.

        A new machine lives only as long as this connection until `commit` is called on it.
        Raises what the keeper reports, or BackendError when it says nothing.
        """
        order = {"home": str(self.home.path), "mode": mode, "id": box_id}
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        try:
            text = json.dumps({**order, "record": record, "plan": plan}).encode()
            await asyncio.to_thread(self._order, text, theirs)
        except BaseException:
            ours.close()
            raise
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

    def _order(self, text: bytes, sock: socket.socket) -> None:
        with self.lock:
            if self.orders is None or self.nursery is None or self.nursery.poll() is not None:
                self._start()
            assert self.orders is not None, "_start opened it"
            socket.send_fds(self.orders, [text], [sock.fileno()])

    def _start(self) -> None:
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [
            sys.executable,
            "-I",
            "-S",
            "-X",
            "utf8",
            "-c",
            _START.format(root=str(SOURCE_ROOT)),
        ]
        path = os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        with open(self.home.path / "keeper.log", "ab") as log:
            self.nursery = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env={"PATH": path, "HOME": "/"},
                cwd="/",
            )
        theirs.close()
        self.orders = ours

    def close(self) -> None:
        """End the nursery; keepers stay."""
        if self.orders is not None:
            self.orders.close()
            self.orders = None
        if self.nursery is not None:
            self.nursery.wait()
            self.nursery = None
