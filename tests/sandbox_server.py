"""An E2B-compatible server in a thread of the test process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from openk3.api.auth import ApiKeys
from openk3.api.e2b.app import create_app
from openk3.api.serving import listen
from openk3.sandbox import Pool, recovery
from openk3.sandbox.store.home import Home


@contextmanager
def running_server(home: Home, key: str, **options: Any) -> Iterator[str]:
    """Its URL; afterwards no sandbox or snapshot of the home is left."""
    sock = listen("127.0.0.1", 0)
    started = threading.Event()
    held: dict[str, uvicorn.Server] = {}

    async def run() -> None:
        app = create_app(Pool(home), ApiKeys([key]), **options)
        config = uvicorn.Config(
            app, log_level="warning", lifespan="on", timeout_graceful_shutdown=2
        )
        held["server"] = uvicorn.Server(config)
        serving = asyncio.create_task(held["server"].serve(sockets=[sock]))
        while not held["server"].started:
            assert not serving.done(), serving.exception()
            await asyncio.sleep(0.01)
        started.set()
        await serving

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert started.wait(120)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        held["server"].should_exit = True
        thread.join(60)
        asyncio.run(_tidy(home))


async def _tidy(home: Home) -> None:
    pool = Pool(home)
    for record in recovery.records(home):
        await pool.kill(record.id)
    for saved in pool.snapshots():
        pool.delete_snapshot(saved.id)
    await pool.close()
