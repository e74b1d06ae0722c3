"""Files of a remote sandbox."""

from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Any

from openk3.errors import BackendError, ConflictError
from openk3.sandbox.agentenv.link import RemoteConnection
from openk3.sandbox.files import Content, Files
from openk3.sandbox.types import Entry


class RemoteFiles(Files):
    """Files over `/files` and `filesystem.Filesystem`."""

    def __init__(self, link: RemoteConnection) -> None:
        self.link = link

    async def _rpc(self, method: str, user: str | None, **body: Any) -> Any:
        return await self.link.unary(f"filesystem.Filesystem/{method}", body, user)

    async def stream(
        self, path: str, *, offset: int = 0, limit: int | None = None, user: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        at = 0
        async for piece in self.link.read(path, user):
            start = max(0, offset - at)
            stop = len(piece) if limit is None else max(0, offset + limit - at)
            at += len(piece)
            if piece[start:stop]:
                yield piece[start:stop]

    async def write(
        self, path: str, data: Content, *, mode: int | None = None, user: str | None = None
    ) -> Entry:
        if mode is not None:
            raise BackendError("the protocol cannot set a file's mode; run chmod")
        await self.link.write(path, data, user)
        return await self.stat(path, user=user)

    async def list(
        self, path: str = ".", *, depth: int = 1, user: str | None = None
    ) -> list[Entry]:
        answer = await self._rpc("ListDir", user, path=path, depth=depth)
        return [_entry(item) for item in answer.get("entries", [])]

    async def stat(self, path: str, *, user: str | None = None) -> Entry:
        return _entry((await self._rpc("Stat", user, path=path))["entry"])

    async def mkdir(self, path: str, *, user: str | None = None) -> bool:
        try:
            await self._rpc("MakeDir", user, path=path)
        except ConflictError:
            return False
        return True

    async def move(self, path: str, target: str, *, user: str | None = None) -> Entry:
        return _entry((await self._rpc("Move", user, source=path, destination=target))["entry"])

    async def remove(self, path: str, *, user: str | None = None) -> None:
        await self._rpc("Remove", user, path=path)

    async def watch(
        self, path: str, *, recursive: bool = False, user: str | None = None, hello: bool = False
    ) -> AsyncGenerator[dict[str, str], None]:
        body = {"path": path, "recursive": recursive}
        async for message in self.link.stream("filesystem.Filesystem/WatchDir", body, user):
            if "start" in message and hello:
                yield {}
            if event := message.get("filesystem"):
                kind = event.get("type", "").removeprefix("EVENT_TYPE_").lower()
                yield {"name": event["name"], "type": kind}


def _entry(item: dict[str, Any]) -> Entry:
    kinds = {
        "FILE_TYPE_FILE": "file",
        "FILE_TYPE_DIRECTORY": "dir",
        "FILE_TYPE_SYMLINK": "symlink",
    }
    return Entry(
        name=item.get("name", ""),
        path=item.get("path", ""),
        kind=kinds.get(item.get("type", ""), "other"),
        size=int(item.get("size", 0)),
        mode=int(item.get("mode", 0)),
        uid=-1,
        gid=-1,
        mtime=unix_time(item.get("modifiedTime")) or 0.0,
        target=item.get("symlinkTarget"),
    )


def unix_time(stamp: str | None) -> float | None:
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp() if stamp else None
