"""Choosing a backend: data and a live test, decided once, never a silent downgrade."""

import os

from openk3.errors import BackendError, InputError, nearest
from openk3.sandbox.local import LocalSandbox, describe
from openk3.sandbox.pool import Pool
from openk3.sandbox.probe import Probe, probe
from openk3.sandbox.requests import SandboxRequest
from openk3.sandbox.sandbox import Sandbox
from openk3.sandbox.types import Capabilities, Info

LOCAL = ("gvisor", "bwrap")
NAMES = ("auto", *LOCAL, "agentenv", "inprocess")

_pools: dict[str, Pool] = {}


def default_pool() -> Pool:
    """The pool of the default home, one per process."""
    from openk3.sandbox.store.home import default_home

    key = str(default_home())
    if key not in _pools:
        _pools[key] = Pool()
    return _pools[key]


async def choose(backend: str, pool: Pool, allow_files_only: bool = False) -> Probe:
    """The local backend to use. Raises BackendError with every reason when there is none."""
    names = LOCAL if allow_files_only else LOCAL[:1]
    reasons = []
    for name in [backend] if backend != "auto" else names:
        found = await probe(pool, name)
        if found.ok:
            return found
        reasons.append(f"{name}: {found.reason}")
    if backend == "auto" and not allow_files_only:
        reasons.append(
            "bwrap was not tried: processes do not survive a pause there; allow_files_only=True "
            "accepts that"
        )
    raise BackendError("no sandbox backend works here. " + " | ".join(reasons))


def resolve(backend: str) -> str:
    """`agentenv`, `inprocess`, or the local family that `choose` decides in."""
    if backend not in NAMES:
        raise InputError(f"backend {backend!r}{nearest(backend, NAMES)}: one of {', '.join(NAMES)}")
    if backend == "auto" and os.environ.get("E2B_API_URL"):
        return "agentenv"
    return backend


async def create(backend: str, request: SandboxRequest, pool: Pool | None) -> Sandbox:
    """See `Sandbox.create`."""
    backend = resolve(backend)
    if backend == "agentenv":
        from openk3.sandbox.agentenv import RemoteSandbox

        return await RemoteSandbox.begin(request)
    if backend == "inprocess":
        from openk3.sandbox.inprocess import InProcessSandbox

        return InProcessSandbox(request)
    if request.network.wanted:
        raise BackendError(
            "the local backends offer no network at all; leave `network` out or use agentenv"
        )
    pool = pool or default_pool()
    if backend != "auto":
        pool.starter.require_backend(request.template, backend)  # whether or not it works here
    chosen = await choose(backend, pool, request.allow_files_only)
    record, connection = await pool.create(request, chosen.backend)
    return LocalSandbox(pool, record, Capabilities(**chosen.capabilities), connection)


async def connect(
    sandbox_id: str, *, backend: str, timeout: float | None, pool: Pool | None
) -> Sandbox:
    """See `Sandbox.connect`."""
    if resolve(backend) == "agentenv":
        from openk3.sandbox.agentenv import RemoteSandbox

        return await RemoteSandbox.find(sandbox_id, timeout)
    pool = pool or default_pool()
    record = pool.record(sandbox_id)
    found = await probe(pool, record.backend)
    connection = await pool.connect(sandbox_id, timeout)
    return LocalSandbox(
        pool, pool.record(sandbox_id), Capabilities(**found.capabilities), connection
    )


async def list_all(*, backend: str, pool: Pool | None) -> list[Info]:
    """See `Sandbox.list`."""
    if resolve(backend) == "agentenv":
        from openk3.sandbox.agentenv import RemoteSandbox

        return await RemoteSandbox.find_all()
    from openk3.sandbox import recovery

    pool = pool or default_pool()
    rows = []
    for record in recovery.records(pool.home):
        found = await probe(pool, record.backend)
        if found.ok:
            rows.append(describe(record, Capabilities(**found.capabilities)))
    return rows


async def delete_snapshot(snapshot_id: str, *, backend: str, pool: Pool | None) -> None:
    """See `Sandbox.delete_snapshot`."""
    if resolve(backend) == "agentenv":
        from openk3.sandbox.agentenv import RemoteSandbox

        await RemoteSandbox.forget_snapshot(snapshot_id)
    else:
        (pool or default_pool()).delete_snapshot(snapshot_id)
