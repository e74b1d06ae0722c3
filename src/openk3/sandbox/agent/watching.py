"""Directory watches (inotify), as the E2B protocol offers them."""

import ctypes
import os
import struct
from typing import Any

from openk3.sandbox.agent.loop import Channel, Loop
from openk3.sandbox.agent.users import Users, acting_as

CREATE, REMOVE, WRITE, RENAME, CHMOD = 0x100, 0x200, 0x2, 0x40 | 0x80, 0x4
SELF_GONE, IS_DIR, OVERFLOW = 0x400 | 0x800, 0x40000000, 0x4000
MASK = CREATE | REMOVE | WRITE | RENAME | CHMOD
NAMES = ((CREATE, "create"), (REMOVE, "remove"), (WRITE, "write"), (RENAME, "rename"))
EVENT = struct.Struct("iIII")


class Watches:
    """CALL watch: EVENTs `{"events": [{"name", "type"}]}` until the caller cancels."""

    def __init__(self, loop: Loop, users: Users) -> None:
        self.loop, self.users = loop, users

    def start(self, channel: Channel, params: dict[str, Any]) -> None:
        """Raises OSError when the directory cannot be watched."""
        user = self.users.find(params.get("user"))
        root = os.path.join(user.home, params["path"])
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        watch = _Watch(libc, fd, root, bool(params.get("recursive")))
        try:
            with acting_as(user):
                os.listdir(root)
                watch.add(root)
        except OSError:
            os.close(fd)
            raise
        self.loop.watch(fd, lambda: self._read(channel, watch))
        channel.on_cancel = lambda: self._stop(channel, watch)
        channel.event({"events": []})

    def _read(self, channel: Channel, watch: "_Watch") -> None:
        if events := watch.read():
            channel.event({"events": events})

    def _stop(self, channel: Channel, watch: "_Watch") -> None:
        self.loop.unwatch(watch.fd)
        os.close(watch.fd)
        self.loop.channels.pop(channel.number, None)


class _Watch:
    def __init__(self, libc: ctypes.CDLL, fd: int, root: str, recursive: bool) -> None:
        self.libc, self.fd, self.root, self.recursive = libc, fd, root, recursive
        self.folders: dict[int, str] = {}

    def add(self, folder: str) -> None:
        number = self.libc.inotify_add_watch(self.fd, os.fsencode(folder), MASK)
        if number < 0:
            raise OSError(ctypes.get_errno(), f"cannot watch {folder}")
        self.folders[number] = folder
        if self.recursive:
            with os.scandir(folder) as items:
                for item in items:
                    if item.is_dir(follow_symlinks=False):
                        self.add(item.path)

    def read(self) -> list[dict[str, str]]:
        found, raw, at = [], os.read(self.fd, 64 << 10), 0
        while at < len(raw):
            number, mask, _, length = EVENT.unpack_from(raw, at)
            name = os.fsdecode(raw[at + EVENT.size : at + EVENT.size + length].rstrip(b"\0"))
            at += EVENT.size + length
            path = os.path.join(self.folders.get(number, self.root), name)
            kind = next((kind for bit, kind in NAMES if mask & bit), "chmod")
            found.append({"name": os.path.relpath(path, self.root), "type": kind})
            if self.recursive and mask & CREATE and mask & IS_DIR and os.path.isdir(path):
                self.add(path)
        return found
