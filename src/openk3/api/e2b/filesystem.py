"""`filesystem.Filesystem`: folders, moves and watches inside a sandbox."""

import asyncio
import secrets
import stat
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from fastapi import Request, Response

from openk3.api.e2b import wire
from openk3.errors import LimitError, NotFoundError
from openk3.sandbox.local import LocalSandbox
from openk3.sandbox.types import Entry

router = wire.router_inside("folders", "/filesystem.Filesystem")
KINDS = {
    "file": "FILE_TYPE_FILE",
    "dir": "FILE_TYPE_DIRECTORY",
    "symlink": "FILE_TYPE_SYMLINK",
    "other": "FILE_TYPE_UNSPECIFIED",
}
NAMES = {0: "root", 1000: "user"}
MAX_WATCHERS, MAX_EVENTS = 64, 10_000


def entry_info(entry: Entry) -> dict[str, Any]:
    """An entry in the protocol's words; 64-bit numbers are strings in its JSON."""
    info = {
        "name": entry.name,
        "path": entry.path,
        "type": KINDS[entry.kind],
        "size": str(entry.size),
        "mode": entry.mode,
        "permissions": stat.filemode(_type_bits(entry.kind) | entry.mode),
        "owner": NAMES.get(entry.uid, str(entry.uid)),
        "group": NAMES.get(entry.gid, str(entry.gid)),
        "modifiedTime": datetime.fromtimestamp(entry.mtime, UTC).isoformat().replace("+00:00", "Z"),
    }
    return {**info, "symlinkTarget": entry.target} if entry.target else info


def _type_bits(kind: str) -> int:
    return {"dir": stat.S_IFDIR, "symlink": stat.S_IFLNK}.get(kind, stat.S_IFREG)


async def list_dir(box: LocalSandbox, body: dict[str, Any], request: Request) -> dict[str, Any]:
    user = wire.user_of(request)
    depth = int(body.get("depth") or 1)
    found = await box.files.list(body.get("path") or ".", depth=depth, user=user)
    return {"entries": [entry_info(entry) for entry in found]}


async def stat_path(box: LocalSandbox, body: dict[str, Any], request: Request) -> dict[str, Any]:
    return {"entry": entry_info(await box.files.stat(body["path"], user=wire.user_of(request)))}


async def make_dir(box: LocalSandbox, body: dict[str, Any], request: Request) -> dict[str, Any]:
    user = wire.user_of(request)
    if not await box.files.mkdir(body["path"], user=user):
        raise wire.AlreadyExistsError(f"directory already exists: {body['path']}")
    return {"entry": entry_info(await box.files.stat(body["path"], user=user))}


async def move(box: LocalSandbox, body: dict[str, Any], request: Request) -> dict[str, Any]:
    user = wire.user_of(request)
    return {
        "entry": entry_info(await box.files.move(body["source"], body["destination"], user=user))
    }


async def remove(box: LocalSandbox, body: dict[str, Any], request: Request) -> dict[str, Any]:
    await box.files.remove(body["path"], user=wire.user_of(request))
    return {}


def _event(event: dict[str, str]) -> dict[str, str]:
    return {"name": event["name"], "type": f"EVENT_TYPE_{event['type'].upper()}"}


async def watch_dir(
    box: LocalSandbox, body: dict[str, Any], request: Request
) -> AsyncIterator[dict[str, Any]]:
    recursive = bool(body.get("recursive"))
    watch = box.files.watch(
        body["path"], recursive=recursive, user=wire.user_of(request), hello=True
    )
    try:
        async for event in watch:
            yield {"filesystem": _event(event)} if event else {"start": {}}
    finally:
        await watch.aclose()


class Watcher:
    """A watch whose events wait to be asked for."""

    def __init__(self, box: LocalSandbox, watch: Any) -> None:
        self.box_id = box.id
        self.events: list[dict[str, str]] = []
        self.ready = asyncio.Event()
        self.task = asyncio.ensure_future(self._collect(watch))

    async def _collect(self, watch: Any) -> None:
        async for event in watch:
            self.ready.set()
            if event:
                self.events.append(_event(event))
                del self.events[:-MAX_EVENTS]


def _watchers(request: Request) -> dict[str, Watcher]:
    return request.app.state.watchers


async def create_watcher(
    box: LocalSandbox, body: dict[str, Any], request: Request
) -> dict[str, Any]:
    held = _watchers(request)
    for name in [name for name, watcher in held.items() if watcher.task.done()]:
        del held[name]
    if sum(watcher.box_id == box.id for watcher in held.values()) >= MAX_WATCHERS:
        raise LimitError(f"{MAX_WATCHERS} watchers are open in this sandbox; remove some")
    recursive = bool(body.get("recursive"))
    user = wire.user_of(request)
    watcher = Watcher(
        box, box.files.watch(body["path"], recursive=recursive, user=user, hello=True)
    )
    ready = asyncio.ensure_future(watcher.ready.wait())
    await asyncio.wait({ready, watcher.task}, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if watcher.task.done():
        watcher.task.result()  # raises why it could not be watched
    name = f"w{secrets.token_hex(8)}"
    held[name] = watcher
    return {"watcherId": name}


def _watcher(box: LocalSandbox, body: dict[str, Any], request: Request) -> Watcher:
    watcher = _watchers(request).get(body.get("watcherId", ""))
    if watcher is None or watcher.box_id != box.id:
        raise NotFoundError(f"watcher {body.get('watcherId')!r} not found")
    return watcher


async def watcher_events(
    box: LocalSandbox, body: dict[str, Any], request: Request
) -> dict[str, Any]:
    watcher = _watcher(box, body, request)
    events, watcher.events = watcher.events, []
    return {"events": events}


async def remove_watcher(
    box: LocalSandbox, body: dict[str, Any], request: Request
) -> dict[str, Any]:
    _watcher(box, body, request).task.cancel()
    del _watchers(request)[body["watcherId"]]
    return {}


UNARY: dict[str, wire.Unary] = {
    "ListDir": list_dir,
    "Stat": stat_path,
    "MakeDir": make_dir,
    "Move": move,
    "Remove": remove,
    "CreateWatcher": create_watcher,
    "GetWatcherEvents": watcher_events,
    "RemoveWatcher": remove_watcher,
}


@router.post("/WatchDir", **wire.described(stream=True))
async def watch_route(request: Request) -> Response:
    return await wire.answer_stream(request, request.app.state.service, watch_dir)


@router.post("/{method}", **wire.described(*UNARY))
async def unary_route(method: str, request: Request) -> Response:
    if method not in UNARY:
        return wire.error_response("not_found", f"filesystem.Filesystem has no method {method}")
    return await wire.answer_unary(request, request.app.state.service, UNARY[method])
