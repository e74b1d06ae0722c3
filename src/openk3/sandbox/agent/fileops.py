"""File operations, done inside the sandbox and with the rights of the sandbox's user.

A symlink, `..` or race inside can therefore lead only to what that user reaches anyway.
"""

import errno
import os
import shutil
import stat
from collections.abc import Callable
from typing import Any

from openk3.sandbox import frames
from openk3.sandbox.agent.loop import Channel
from openk3.sandbox.agent.users import User, Users, acting_as

MAX_ENTRIES = 100_000


class FileOps:
    """The file calls of the protocol; each takes the channel and the call's parameters."""

    def __init__(self, users: Users) -> None:
        self.users = users
        self.table: dict[str, Callable[[Channel, dict[str, Any]], None]] = {
            "read": self.read,
            "write": self.write,
            "list": self.list,
            "stat": self.stat,
            "mkdir": self.mkdir,
            "move": self.move,
            "remove": self.remove,
        }

    def call(self, op: str, channel: Channel, params: dict[str, Any]) -> None:
        """Run one operation; its OSError or ValueError becomes the channel's ERROR."""
        try:
            self.table[op](channel, params)
        except (OSError, ValueError) as error:
            channel.error(*explain(error, params.get("path", "")))

    def _locate(self, params: dict[str, Any], key: str = "path") -> tuple[User, str]:
        user = self.users.find(params.get("user"))
        path = params[key]
        if "\0" in path:
            raise ValueError("a path cannot hold a NUL character")
        if path == "~" or path.startswith("~/"):
            path = user.home + path[1:]
        return user, os.path.normpath(os.path.join(user.home, path)) if path else user.home

    def read(self, channel: Channel, params: dict[str, Any]) -> None:
        user, path = self._locate(params)
        with acting_as(user):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            kind = errno.EISDIR if stat.S_ISDIR(info.st_mode) else errno.EINVAL
            raise OSError(kind, "not a regular file")
        channel.event({"size": info.st_size})
        os.lseek(fd, params.get("offset") or 0, os.SEEK_SET)
        _Reader(channel, fd, params.get("limit")).pump()

    def write(self, channel: Channel, params: dict[str, Any]) -> None:
        """DATA frames go to a file beside the target, which EOF moves into place."""
        user, path = self._locate(params)
        path = os.path.realpath(path)
        with acting_as(user):
            if os.path.exists(path) and not os.path.isfile(path):
                raise OSError(errno.EISDIR, "not a regular file")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            writer = _Writer(channel, user, path, params)
        channel.on_data, channel.on_eof, channel.on_cancel = writer.data, writer.eof, writer.drop

    def list(self, channel: Channel, params: dict[str, Any]) -> None:
        user, path = self._locate(params)
        with acting_as(user):
            if not stat.S_ISDIR(os.stat(path).st_mode):
                raise OSError(errno.ENOTDIR, "not a directory")
            count, batch = 0, []
            for item in _walk(path, max(1, params.get("depth") or 1)):
                batch.append(entry(item))
                count += 1
                if len(batch) == 256:
                    channel.event(batch)
                    batch = []
                if count >= MAX_ENTRIES:
                    raise OSError(errno.E2BIG, f"more than {MAX_ENTRIES} entries")
        channel.event(batch)
        channel.end({"count": count})

    def stat(self, channel: Channel, params: dict[str, Any]) -> None:
        user, path = self._locate(params)
        with acting_as(user):
            channel.end(entry(path))

    def mkdir(self, channel: Channel, params: dict[str, Any]) -> None:
        user, path = self._locate(params)
        with acting_as(user):
            if os.path.isdir(path):
                return channel.end({"created": False, "entry": entry(path)})
            os.makedirs(path)
            return channel.end({"created": True, "entry": entry(path)})

    def move(self, channel: Channel, params: dict[str, Any]) -> None:
        user, path = self._locate(params)
        _, target = self._locate(params, "target")
        with acting_as(user):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.move(path, target)
            channel.end(entry(target))

    def remove(self, channel: Channel, params: dict[str, Any]) -> None:
        user, path = self._locate(params)
        with acting_as(user):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        channel.end()


class _Reader:
    def __init__(self, channel: Channel, fd: int, limit: int | None) -> None:
        self.channel, self.fd, self.left = channel, fd, limit
        channel.on_credit = self.pump
        channel.on_cancel = self.drop

    def pump(self) -> None:
        while self.channel.credit > 0:
            size = min(frames.PIECE, self.channel.credit)
            size = size if self.left is None else min(size, self.left)
            piece = os.read(self.fd, size) if size else b""
            if not piece:
                os.close(self.fd)
                return self.channel.end()
            if self.left is not None:
                self.left -= len(piece)
            self.channel.data(frames.STREAM_FILE, piece)
        return None

    def drop(self) -> None:
        os.close(self.fd)
        self.channel.loop.channels.pop(self.channel.number, None)


class _Writer:
    def __init__(self, channel: Channel, user: User, path: str, params: dict[str, Any]) -> None:
        self.channel, self.user, self.path = channel, user, path
        self.aside = os.path.join(os.path.dirname(path), f".k3-{os.urandom(6).hex()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(self.aside, flags, 0o666)
        mode = params.get("mode")
        if mode is None and os.path.exists(path):
            mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode is not None:
            os.fchmod(self.fd, mode)

    def data(self, piece: bytes) -> None:
        view = memoryview(piece)
        try:
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError as error:
            self._discard()
            return self.channel.error(*explain(error, self.path))
        return self.channel.grant(len(piece))

    def eof(self) -> None:
        try:
            os.close(self.fd)  # a full disk may speak up only now
            with acting_as(self.user):
                os.rename(self.aside, self.path)
                info = entry(self.path)
        except OSError as error:
            self._unlink()
            return self.channel.error(*explain(error, self.path))
        return self.channel.end(info)

    def drop(self) -> None:
        self._discard()
        self.channel.loop.channels.pop(self.channel.number, None)

    def _discard(self) -> None:
        os.close(self.fd)
        self._unlink()

    def _unlink(self) -> None:
        with acting_as(self.user):
            if os.path.lexists(self.aside):
                os.unlink(self.aside)


def _walk(path: str, depth: int) -> "list[str]":
    found = []
    with os.scandir(path) as items:
        for item in sorted(items, key=lambda item: item.name):
            found.append(item.path)
            if depth > 1 and item.is_dir(follow_symlinks=False) and len(found) < MAX_ENTRIES:
                try:
                    found += _walk(item.path, depth - 1)
                except PermissionError:
                    continue
    return found


def entry(path: str) -> dict[str, Any]:
    """What is known of one path; the link itself when it is a link."""
    info = os.lstat(path)
    mode = info.st_mode
    target = os.readlink(path) if stat.S_ISLNK(mode) else None
    kind = "file" if stat.S_ISREG(mode) else "dir" if stat.S_ISDIR(mode) else "other"
    return {
        "name": os.path.basename(path),
        "path": path,
        "kind": "symlink" if target is not None else kind,
        "size": info.st_size,
        "mode": stat.S_IMODE(mode),
        "uid": info.st_uid,
        "gid": info.st_gid,
        "mtime": info.st_mtime,
        "target": target,
    }


def explain(error: OSError | ValueError, path: str) -> tuple[str, str]:
    """(kind, message) of a failed file operation."""
    shown = ascii(path) if len(path) < 200 else ascii(path[:200]) + "..."
    if not isinstance(error, OSError):
        return "input", f"{shown}: {error}"
    kinds = {
        errno.ENOENT: "not_found",
        errno.EACCES: "permission",
        errno.EPERM: "permission",
        errno.EEXIST: "exists",
        errno.ENOSPC: "no_space",
        errno.EDQUOT: "no_space",
        errno.EFBIG: "no_space",
    }
    return kinds.get(error.errno or 0, "input"), f"{shown}: {error.strerror or error}"
