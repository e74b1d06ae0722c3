"""The live self-test of a local backend: create, run, checkpoint, restore, compare, delete.

That a program exists or a device opens proves nothing. The answer is cached in `probes.json` per
program version, kernel and user.
"""

import asyncio
import os
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Any

from openk3._io import write_json
from openk3.errors import BackendError, OpenK3Error, StorageError
from openk3.sandbox import engines, frames
from openk3.sandbox.client import Connection
from openk3.sandbox.keeper import cgroups
from openk3.sandbox.pool import Pool
from openk3.sandbox.requests import SandboxRequest
from openk3.sandbox.store.records import Record
from openk3.sandbox.templates import runtime
from openk3.sandbox.types import Capabilities

ECHO = "import sys; a = sys.stdin.readline(); sys.stdin.readline(); print(a, end='')"


@dataclass
class Probe(Record):
    """What a self-test found."""

    backend: str
    ok: bool
    reason: str
    version: str
    key: str
    capabilities: dict[str, bool]
    seconds: float


async def probe(pool: Pool, backend: str, *, fresh: bool = False) -> Probe:
    """The cached answer for this machine, or a new test (about two seconds)."""
    try:
        engine = await asyncio.to_thread(engines.find, backend)
    except BackendError as error:
        return Probe(backend, False, str(error), "", "", {}, 0.0)
    key = "/".join(
        [engine.version, os.uname().release, str(os.geteuid()), engines.cpu_fingerprint()]
    )
    file = pool.home.path / f"probe-{backend}.json"
    if file.exists() and not fresh:
        try:
            known = Probe.load(file)
        except StorageError:
            known = None
        if known and known.key == key and known.ok:
            return known
    started = time.perf_counter()
    try:
        await _exercise(pool, backend)
        found = _capabilities(backend)
        result = Probe(backend, True, "", engine.version, key, asdict(found), 0.0)
    except (OpenK3Error, OSError) as error:
        result = Probe(backend, False, str(error), engine.version, key, {}, 0.0)
    result.seconds = time.perf_counter() - started
    write_json(file, asdict(result))
    return result


def _capabilities(backend: str) -> Capabilities:
    limited = cgroups.available()
    return Capabilities(
        memory=backend == "gvisor",
        fork=True,
        network=False,
        cpu_limit="cpu" in limited,
        memory_limit="memory" in limited,
        disk_limit=True,  # the upper is an ext4 image or a tmpfs of that size
    )


async def _exercise(pool: Pool, backend: str) -> None:
    """Raises what fails first."""
    secret = secrets.token_hex(8)
    request = SandboxRequest(template="empty", user="root", allow_files_only=True)
    record, connection = await pool.create(request, backend)
    memory = backend == "gvisor"
    try:
        python = [word for word in runtime.agent_argv() if word not in ("-c",)][:-1]
        call = connection.open("write", path="/root/secret")
        await call.send(secret.encode())
        call.send_eof()
        await call.result()
        if memory:
            cmd = [*python, "-c", ECHO]
            job = connection.open("start", cmd=cmd, stdin=True, detach=True, tag="echo", env={})
            await anext(job)
            await job.send(f"{secret}\n".encode())
        await connection.call("checkpoint", stay=False, memory=memory)
        await connection.close()
        connection = await pool.resume(record.id)
        kept = await _read(connection.open("read", path="/root/secret"))
        if kept != secret:
            raise BackendError(f"a file came back as {kept!r}, not {secret!r}")
        if memory:
            await _compare_memory(connection, secret)
    finally:
        await connection.close()
        await pool.kill(record.id)


async def _compare_memory(connection: Connection, secret: str) -> None:
    job = connection.open("attach", tag="echo")
    await anext(job)
    await job.send(b"\n")
    said = b"".join([value[1:] async for kind, value in job if kind == frames.DATA])
    if said.decode().strip() != secret:
        raise BackendError(f"a process came back with {said!r}, not {secret!r}")


async def _read(call: Any) -> str:
    pieces = [value[1:] async for kind, value in call if kind == frames.DATA]
    return b"".join(pieces).decode()
