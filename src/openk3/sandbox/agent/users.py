"""Users inside the sandbox, from its own /etc/passwd."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class User:
    """Who a command runs as."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str


class Users:
    """Looks users up by name. `single`: only uid 0 exists (the host user is not root)."""

    def __init__(self, default: str = "user", single: bool = False) -> None:
        self.default, self.single = default, single

    def find(self, name: str | None) -> User:
        """Raises ValueError for a name that /etc/passwd does not have."""
        name = name or self.default
        for line in _passwd():
            fields = line.split(":")
            if len(fields) >= 7 and fields[0] == name:
                uid, gid = (0, 0) if self.single else (int(fields[2]), int(fields[3]))
                return User(name, uid, gid, fields[5], fields[6].strip() or "/bin/sh")
        if name in ("root", "user"):  # a template without /etc/passwd still has someone to be
            uid = 0 if self.single or name == "root" else 1000
            home = "/root" if name == "root" else "/home/user"
            return User(name, uid, uid, home, "/bin/sh")
        raise ValueError(f"user {name!r} is not in this sandbox's /etc/passwd")


def _passwd() -> list[str]:
    try:
        with open("/etc/passwd", encoding="utf-8", errors="replace") as handle:
            return handle.readlines()
    except OSError:
        return []


@contextmanager
def acting_as(user: User) -> Iterator[None]:
    """File access with this user's rights, not the agent's."""
    if user.uid == 0:
        yield
        return
    groups = os.getgroups()
    os.setgroups([user.gid])
    os.setegid(user.gid)
    os.seteuid(user.uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
