"""`process.Process`: commands and terminals inside a sandbox."""

import base64
import signal
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request, Response

from openk3.api.e2b import wire
from openk3.errors import InputError
from openk3.sandbox.local import LocalSandbox
from openk3.sandbox.process import Process

router = wire.router_inside("commands", "/process.Process")
SIGNALS = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL}


def _selector(body: dict[str, Any]) -> dict[str, Any]:
    process = body.get("process") or {}
    if not process.get("pid") and not process.get("tag"):
        raise InputError("process: a pid or a tag is needed")
    return {"pid": process.get("pid"), "tag": process.get("tag")}


def _size(body: dict[str, Any]) -> tuple[int, int] | None:
    if "pty" not in body:
        return None
    size = (body["pty"] or {}).get("size") or {}
    return int(size.get("rows", 24)), int(size.get("cols", 80))


async def _events(job: Process, tty: bool) -> AsyncIterator[dict[str, Any]]:
    yield {"event": {"start": {"pid": job.pid}}}
    try:
        async for stream, piece in job:
            kind = "pty" if tty else stream
            yield {"event": {"data": {kind: base64.b64encode(piece).decode()}}}
        ended = job.ended
        if ended["timed_out"]:
            raise TimeoutError("the command ran into its time limit and was killed")
        status = (
            f"signal: {signal.Signals(ended['signal']).name}"
            if ended["signal"]
            else (f"exit status {ended['exit_code']}")
        )
        end: dict[str, Any] = {"exitCode": ended["exit_code"], "exited": True, "status": status}
        if ended["reason"]:
            end["error"] = ended["reason"]
        yield {"event": {"end": end}}
    finally:
        job.let_go()


async def start(
    box: LocalSandbox, body: dict[str, Any], request: Request
) -> AsyncIterator[dict[str, Any]]:
    """A hung-up listener leaves the command running, as the protocol has it."""
    wanted = body.get("process") or {}
    limit_ms = int(request.headers.get("connect-timeout-ms") or 0)
    tty = _size(body)
    job = await box.start(
        [wanted["cmd"], *wanted.get("args", [])],
        cwd=wanted.get("cwd"),
        env=wanted.get("envs"),
        user=wire.user_of(request),
        timeout=limit_ms / 1000 or None,
        stdin=bool(body.get("stdin", True)),
        tty=tty,
        detach=True,
        tag=body.get("tag"),
    )
    async for message in _events(job, tty is not None):
        yield message


async def connect(
    box: LocalSandbox, body: dict[str, Any], request: Request
) -> AsyncIterator[dict[str, Any]]:
    del request
    selector = _selector(body)
    rows = [row for row in await box.processes() if selector["pid"] == row["pid"]]
    job = await box.attach(**selector)
    async for message in _events(job, bool(rows and rows[0].get("tty"))):
        yield message


@router.post("/Start", **wire.described(stream=True))
async def start_route(request: Request) -> Response:
    return await wire.answer_stream(request, request.app.state.service, start)


@router.post("/Connect", **wire.described(stream=True))
async def connect_route(request: Request) -> Response:
    return await wire.answer_stream(request, request.app.state.service, connect)


async def list_processes(
    box: LocalSandbox, body: dict[str, Any], request: Request
) -> dict[str, Any]:
    del body, request
    rows = []
    for row in await box.processes():
        if not row.get("running"):
            continue
        program, *args = row["cmd"] if isinstance(row["cmd"], list) else ["/bin/sh", row["cmd"]]
        config = {"cmd": program, "args": args, "envs": row["env"] or {}, "cwd": row["cwd"]}
        found = {"config": {k: v for k, v in config.items() if v is not None}, "pid": row["pid"]}
        rows.append({**found, "tag": row["tag"]} if row["tag"] else found)
    return {"processes": rows}


async def send_signal(box: LocalSandbox, body: dict[str, Any], request: Request) -> dict[str, Any]:
    del request
    number = SIGNALS.get(body.get("signal", ""))
    if number is None:
        raise InputError(f"signal {body.get('signal')!r}: {', '.join(SIGNALS)}")
    connection = await box.connected()
    await connection.call("signal", **_selector(body), signal=int(number), family=True)
    return {}


async def _feed(box: LocalSandbox, selector: dict[str, Any], value: dict[str, Any]) -> None:
    data = base64.b64decode(value.get("stdin") or value.get("pty") or "")
    connection = await box.connected()
    call = connection.open("stdin", **selector)
    await call.send(data)
    call.send_eof()
    await call.result()


async def send_input(box: LocalSandbox, body: dict[str, Any], request: Request) -> dict[str, Any]:
    del request
    await _feed(box, _selector(body), body.get("input") or {})
    return {}


async def close_stdin(box: LocalSandbox, body: dict[str, Any], request: Request) -> dict[str, Any]:
    del request
    connection = await box.connected()
    call = connection.open("stdin", **_selector(body), close=True)
    call.send_eof()
    await call.result()
    return {}


async def update(box: LocalSandbox, body: dict[str, Any], request: Request) -> dict[str, Any]:
    del request
    if size := _size(body):
        connection = await box.connected()
        await connection.call("resize", **_selector(body), tty=size)
    return {}


async def stream_input(
    box: LocalSandbox, body: dict[str, Any], request: Request
) -> AsyncIterator[dict[str, Any]]:
    selector = _selector(body.get("start") or {})
    async for message in request.state.messages:
        if data := message.get("data"):
            await _feed(box, selector, data.get("input") or {})
    yield {}


@router.post("/StreamInput", **wire.described(stream=True))
async def stream_input_route(request: Request) -> Response:
    return await wire.answer_client_stream(request, request.app.state.service, stream_input)


UNARY: dict[str, wire.Unary] = {
    "List": list_processes,
    "SendSignal": send_signal,
    "SendInput": send_input,
    "CloseStdin": close_stdin,
    "Update": update,
}


@router.post("/{method}", **wire.described(*UNARY))
async def unary_route(method: str, request: Request) -> Response:
    if method not in UNARY:
        return wire.error_response("not_found", f"process.Process has no method {method}")
    return await wire.answer_unary(request, request.app.state.service, UNARY[method])
