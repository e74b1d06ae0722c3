"""The REST half of the E2B protocol: sandboxes, snapshots, templates."""

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Query, Request, Response, Security
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyHeader

from openk3.api.e2b.models import (
    FAILURES,
    CreatedSandbox,
    Fork,
    ForkItem,
    NewSandbox,
    Pause,
    SandboxDetail,
    SavedSnapshot,
    Snapshot,
    Template,
    Timeout,
    Usage,
)
from openk3.api.e2b.service import Service, status_of
from openk3.errors import BackendError, ConflictError, NotFoundError, OpenK3Error
from openk3.sandbox import recovery
from openk3.sandbox.requests import SandboxRequest
from openk3.sandbox.templates import catalog
from openk3.sandbox.types import Limits

PAGE = 100


KEY = APIKeyHeader(name="X-API-Key", scheme_name="ApiKey", auto_error=False)
router = APIRouter(tags=["sandboxes"], dependencies=[Security(KEY)], responses=FAILURES)


CONNECT: dict[str, Any] = {
    "response_model": CreatedSandbox,
    "responses": {201: {"model": CreatedSandbox, "description": "it was paused, and is resumed"}},
}


def service_of(request: Request) -> Service:
    return request.app.state.service


def _refuse_what_is_not_offered(body: NewSandbox) -> None:
    network = body.network or {}
    if network.get("allowOut") or network.get("rules"):
        raise BackendError("sandboxes of this machine have no network; allowOut cannot be honoured")
    for name, value in (("volumeMounts", body.volume_mounts), ("mcp", body.mcp), ("iam", body.iam)):
        if value:
            raise BackendError(f"{name} is not offered by sandboxes of this machine")


@router.post("/sandboxes", status_code=201, response_model=CreatedSandbox)
@router.post("/v2/sandboxes", status_code=201, response_model=CreatedSandbox)
async def create(body: NewSandbox, request: Request) -> dict[str, Any]:
    """Both generations of the SDK create here."""
    service = service_of(request)
    _refuse_what_is_not_offered(body)
    template = {"base": "python"}.get(body.template_id, body.template_id)
    if not template.startswith("snap"):
        with suppress(NotFoundError):  # else a template, or a name that `create` reports
            template = service.pool.find_snapshot(template).id
    wanted = SandboxRequest(
        template.removesuffix(":default"),
        timeout=body.timeout or None,
        on_timeout="pause" if body.auto_pause else "kill",
        metadata=body.metadata,
        env=body.env_vars,
        limits=Limits.from_dict(body.limits or {}),
        allow_files_only=not body.auto_pause_memory,
    )
    record, connection = await service.pool.create(wanted, service.backend)
    await connection.close()
    if await request.is_disconnected():  # nobody will learn its id
        await service.pool.kill(record.id)
    return service.created(record)


@router.get("/sandboxes", response_model=list[SandboxDetail])
@router.get("/v2/sandboxes", response_model=list[SandboxDetail])
async def list_all(
    request: Request,
    response: Response,
    metadata: str | None = None,
    state: str | None = None,
    limit: int = Query(PAGE, ge=1, le=1000),
    next_token: str | None = Query(None, alias="nextToken"),
) -> list[dict[str, Any]]:
    """Running and paused sandboxes, filtered, a page at a time."""
    service = service_of(request)
    wanted = set(state.split(",")) if state else {"running", "paused"}
    pairs = dict(parse_qsl(metadata)) if metadata else {}
    rows = [
        service.detail(record)
        for record in recovery.records(service.pool.home)
        if record.state in wanted and pairs.items() <= record.metadata.items()
    ]
    start = int(next_token) if next_token and next_token.isdigit() else 0
    if start + limit < len(rows):
        response.headers["x-next-token"] = str(start + limit)
    return rows[start : start + limit]


@router.get("/sandboxes/{sandbox_id}", response_model=SandboxDetail)
async def info(sandbox_id: str, request: Request) -> dict[str, Any]:
    service = service_of(request)
    return service.detail(service.sandbox(sandbox_id).record)


@router.delete("/sandboxes/{sandbox_id}", status_code=204)
async def kill(sandbox_id: str, request: Request) -> Response:
    service = service_of(request)
    await service.forget(sandbox_id)
    if not await service.pool.kill(sandbox_id):
        raise NotFoundError(f"sandbox {sandbox_id} not found")
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/pause", status_code=204)
async def pause(sandbox_id: str, request: Request, body: Pause | None = None) -> Response:
    service = service_of(request)
    service.sandbox(sandbox_id)
    await service.pool.pause(sandbox_id, memory=(body or Pause()).memory)
    await service.forget(sandbox_id)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/resume", status_code=201, response_model=CreatedSandbox)
async def resume(sandbox_id: str, request: Request, body: Timeout | None = None) -> dict[str, Any]:
    """The older spelling of connect; only for a paused sandbox."""
    service = service_of(request)
    if service.sandbox(sandbox_id).record.state != "paused":
        raise ConflictError(f"sandbox {sandbox_id} runs already")
    await _bring_up(service, sandbox_id, body or Timeout())
    return service.created(service.pool.record(sandbox_id))


@router.post("/sandboxes/{sandbox_id}/connect", **CONNECT)
@router.post("/v2/sandboxes/{sandbox_id}/connect", **CONNECT)
async def connect(
    sandbox_id: str, request: Request, response: Response, body: Timeout | None = None
) -> dict[str, Any]:
    """200 for a running sandbox, 201 for one that was resumed."""
    service = service_of(request)
    paused = service.sandbox(sandbox_id).record.state == "paused"
    response.status_code = 201 if paused else 200
    await _bring_up(service, sandbox_id, body or Timeout())
    return service.created(service.pool.record(sandbox_id))


async def _bring_up(service: Service, sandbox_id: str, body: Timeout) -> None:
    if not body.memory:
        raise BackendError("resuming without memory is not offered by sandboxes of this machine")
    await service.forget(sandbox_id)
    connection = await service.pool.connect(sandbox_id)
    try:
        record = service.pool.record(sandbox_id)
        if body.timeout > (record.timeout or 0) or record.deadline is None:
            await connection.call("set_timeout", timeout=body.timeout or None)
    finally:
        await connection.close()


@router.post("/sandboxes/{sandbox_id}/timeout", status_code=204)
@router.post("/sandboxes/{sandbox_id}/refreshes", status_code=204)
async def set_timeout(sandbox_id: str, request: Request, body: Timeout) -> Response:
    await service_of(request).sandbox(sandbox_id).set_timeout(float(body.timeout) or None)
    return Response(status_code=204)


@router.post(
    "/sandboxes/{sandbox_id}/fork",
    status_code=201,
    response_model=list[ForkItem],
    response_model_exclude_unset=True,
)
async def fork(sandbox_id: str, request: Request, body: Fork | None = None) -> list[dict[str, Any]]:
    """Each entry is a sandbox or the error of that copy."""
    service = service_of(request)
    service.sandbox(sandbox_id)
    body = body or Fork()
    rows: list[dict[str, Any]] = []
    copies = await service.pool.fork(
        sandbox_id,
        body.count,
        {"timeout": body.timeout or None},
        memory=service.capabilities.memory,
    )
    for item in copies:
        if isinstance(item, OpenK3Error):
            rows.append({"error": {"code": status_of(item), "message": str(item)}})
            continue
        record, connection = item
        await connection.close()
        rows.append({"sandbox": service.created(record)})
    if await request.is_disconnected():
        for row in rows:
            await service.pool.kill(row.get("sandbox", {}).get("sandboxID", ""))
    return rows


@router.post("/sandboxes/{sandbox_id}/snapshots", status_code=201, response_model=SavedSnapshot)
async def snapshot(
    sandbox_id: str, request: Request, body: Snapshot | None = None
) -> dict[str, Any]:
    service = service_of(request)
    service.sandbox(sandbox_id)
    name = body.name if body else None
    saved = await service.pool.snapshot(sandbox_id, name, memory=service.capabilities.memory)
    return {"snapshotID": saved.id, "names": [saved.name] if saved.name else []}


@router.get("/snapshots", response_model=list[SavedSnapshot])
async def snapshots(
    request: Request, sandbox_id: str | None = Query(None, alias="sandboxID")
) -> list[dict[str, Any]]:
    return [
        {"snapshotID": saved.id, "names": [saved.name] if saved.name else []}
        for saved in service_of(request).pool.snapshots()
        if sandbox_id in (None, saved.sandbox_id)
    ]


@router.put("/sandboxes/{sandbox_id}/network", status_code=204)
async def network(sandbox_id: str, request: Request, body: dict[str, Any]) -> Response:
    service_of(request).sandbox(sandbox_id)
    if body.get("allowOut") or body.get("rules"):
        raise BackendError("sandboxes of this machine have no network; allowOut cannot be honoured")
    return Response(status_code=204)


@router.get("/sandboxes/{sandbox_id}/metrics", response_model=list[Usage])
async def metrics(sandbox_id: str, request: Request) -> list[dict[str, Any]]:
    """The present moment only; no history is kept."""
    service = service_of(request)
    record = service.sandbox(sandbox_id).record
    if record.state != "running":
        return []
    now = datetime.now(UTC)
    asked = await (await service.running(sandbox_id).connected()).call("info")
    return [
        {
            "timestamp": now.isoformat().replace("+00:00", "Z"),
            "timestampUnix": int(now.timestamp()),
            "cpuCount": max(1, round(record.limits["cpus"])),
            "cpuUsedPct": 0.0,
            "memUsed": asked["memory_bytes"],
            "memTotal": record.limits["memory_mb"] << 20,
            "memCache": 0,
            "diskUsed": asked["disk_bytes"],
            "diskTotal": record.limits["disk_mb"] << 20,
        }
    ]


@router.delete("/templates/{template_id}", status_code=204)
async def delete_template(template_id: str, request: Request) -> Response:
    """Deletes a snapshot; the templates themselves are managed on the command line."""
    service_of(request).pool.delete_snapshot(template_id.removesuffix(":default"))
    return Response(status_code=204)


@router.get("/templates", response_model=list[Template])
@router.get("/v2/templates", response_model=list[Template])
async def templates(request: Request) -> list[dict[str, Any]]:
    rows = catalog.describe(service_of(request).pool.home)
    return [{"templateID": row["id"], "aliases": [row["name"]], "public": False} for row in rows]


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Errors of this project as the protocol's `{code, message}`."""
    assert isinstance(error, OpenK3Error), "registered for OpenK3Error only"
    status = status_of(error)
    headers = {"Should-Retry": "true"} if status == 429 else {}
    return JSONResponse({"code": status, "message": str(error)}, status, headers)
