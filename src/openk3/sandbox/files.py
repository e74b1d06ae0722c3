"""Files of a sandbox. Every path is resolved inside it, with the rights of its user."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path, PurePosixPath
from typing import Any

from openk3.errors import InputError, LimitError
from openk3.sandbox import frames
from openk3.sandbox.client import Connection
from openk3.sandbox.types import Entry

Content = bytes | str | AsyncIterator[bytes]
AT_ONCE = 32  # uploads in flight together
MAX_READ = 1 << 30


class Files:
    """`await sandbox.files.write("a.txt", "hello")`. Relative paths start at the user's home."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect

    async def _call(self, op: str, **params: Any) -> Any:
        connection: Connection = await self._connect()
        return await connection.call(op, **params)

    async def stream(
        self, path: str, *, offset: int = 0, limit: int | None = None, user: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The content in pieces. Raises NotFoundError, DeniedError, InputError (not a file)."""
        connection: Connection = await self._connect()
        call = connection.open("read", path=path, offset=offset, limit=limit, user=user)
        try:
            async for kind, value in call:
                if kind == frames.DATA:
                    yield value[1:]
        finally:
            call.cancel()

    async def read(self, path: str, *, max_bytes: int = MAX_READ, user: str | None = None) -> bytes:
        """The whole content. Raises LimitError beyond `max_bytes`."""
        content = bytearray()
        async with aclosing(self.stream(path, user=user)) as pieces:
            async for piece in pieces:
                content += piece
                if len(content) > max_bytes:
                    raise LimitError(f"{path!r} is larger than {max_bytes} bytes; use stream()")
        return bytes(content)

    async def read_text(self, path: str, *, user: str | None = None) -> str:
        """The whole content as UTF-8."""
        return (await self.read(path, user=user)).decode()

    async def write(
        self, path: str, data: Content, *, mode: int | None = None, user: str | None = None
    ) -> Entry:
        """Create or replace a file atomically, making parent folders."""
        connection: Connection = await self._connect()
        call = connection.open("write", path=path, mode=mode, user=user)
        try:
            if isinstance(data, bytes | str):
                await call.send(data.encode() if isinstance(data, str) else data)
            else:
                async for piece in data:
                    await call.send(piece)
            call.send_eof()
            return Entry(**await call.result())
        finally:
            call.cancel()

    async def write_many(
        self, files: Mapping[str, bytes | str], *, user: str | None = None
    ) -> list[Entry]:
        """Many files over one connection without waiting for each."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(path: str, data: bytes | str) -> Entry:
            async with gate:
                return await self.write(path, data, user=user)

        return list(await asyncio.gather(*(one(path, data) for path, data in files.items())))

    async def list(
        self, path: str = ".", *, depth: int = 1, user: str | None = None
    ) -> list[Entry]:
        """Entries of a folder, down to `depth` levels; symlinks are not followed."""
        connection: Connection = await self._connect()
        call = connection.open("list", path=path, depth=depth, user=user)
        found: list[Entry] = []
        async for kind, value in call:
            if kind == frames.EVENT:
                found += [Entry(**item) for item in value]
        return found

    async def stat(self, path: str, *, user: str | None = None) -> Entry:
        """What is at a path; a symlink itself, not its target."""
        return Entry(**await self._call("stat", path=path, user=user))

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        try:
            await self.stat(path, user=user)
        except LookupError:
            return False
        return True

    async def mkdir(self, path: str, *, user: str | None = None) -> bool:
        """Make a folder and its parents. False when it was there."""
        return (await self._call("mkdir", path=path, user=user))["created"]

    async def move(self, path: str, target: str, *, user: str | None = None) -> Entry:
        """Rename or move, also over file systems."""
        return Entry(**await self._call("move", path=path, target=target, user=user))

    async def remove(self, path: str, *, user: str | None = None) -> None:
        """Delete a file, or a folder with all it holds."""
        await self._call("remove", path=path, user=user)

    async def watch(
        self, path: str, *, recursive: bool = False, user: str | None = None, hello: bool = False
    ) -> AsyncGenerator[dict[str, str], None]:
        """Changes below a folder as `{"name", "type"}`, from the moment of the first `anext`.

        hello: begin with an empty event once the watch is in place.
        """
        connection: Connection = await self._connect()
        call = connection.open("watch", path=path, recursive=recursive, user=user)
        try:
            async for kind, value in call:
                if kind == frames.EVENT:
                    for event in value["events"] or ([{}] if hello else []):
                        yield event
        finally:
            call.cancel()

    # -- whole trees ------------------------------------------------------------------------

    async def upload(self, local: str | Path, remote: str, *, user: str | None = None) -> int:
        """Copy a file or folder of this machine into the sandbox; how many files."""
        local = Path(local)
        if local.is_file():
            jobs = [(local, remote)]
        elif local.is_dir():
            found = sorted(place for place in local.rglob("*") if place.is_file())
            jobs = [(place, f"{remote}/{place.relative_to(local).as_posix()}") for place in found]
        else:
            raise InputError(f"{local} is no file or folder of this machine")
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(place: Path, target: str) -> None:
            async with gate:
                mode = place.stat().st_mode & 0o777
                await self.write(target, _pieces(place), mode=mode, user=user)

        await asyncio.gather(*(one(*job) for job in jobs))
        return len(jobs)

    async def download(self, remote: str, local: str | Path, *, user: str | None = None) -> int:
        """Copy a file or folder out of the sandbox; how many files. Symlinks are left out.

        Names come from untrusted code: one that would leave `local` raises InputError.
        """
        local = Path(local)
        top = await self.stat(remote, user=user)
        if top.kind == "file":
            local.parent.mkdir(parents=True, exist_ok=True)
            await self._fetch(top.path, local, user)
            return 1
        if top.kind != "dir":
            raise InputError(f"{remote!r} in the sandbox is a {top.kind}, not a file or folder")
        local.mkdir(parents=True, exist_ok=True)
        count = 0
        for entry in await self.list(top.path, depth=1, user=user):
            if entry.kind in ("file", "dir"):
                name = safe_name(entry.name)
                count += await self.download(f"{top.path}/{name}", local / name, user=user)
        return count

    async def _fetch(self, remote: str, local: Path, user: str | None) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(local, flags, 0o644), "wb") as out:
            async with aclosing(self.stream(remote, user=user)) as pieces:
                async for piece in pieces:
                    out.write(piece)


def safe_name(name: str) -> str:
    """A single path component that stays in its folder. Raises InputError otherwise."""
    if name in ("", ".", "..") or "/" in name or "\0" in name or PurePosixPath(name).is_absolute():
        raise InputError(f"the sandbox names a file {name!r}; refused")
    return name


async def _pieces(place: Path) -> AsyncIterator[bytes]:
    with open(place, "rb") as handle:
        while piece := handle.read(frames.PIECE * 4):
            yield piece
