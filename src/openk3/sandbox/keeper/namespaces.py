"""Namespaces, mounts and loop devices through the system calls themselves."""

import ctypes
import errno
import fcntl
import os
import struct
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x4000, 0x40000
MNT_DETACH = 2
PR_SET_DUMPABLE, PR_SET_NAME = 4, 15

LOOP_CTL_GET_FREE, LOOP_CONFIGURE, LOOP_CLR_FD = 0x4C82, 0x4C0A, 0x4C01
LO_READ_ONLY, LO_AUTOCLEAR = 1, 4
LOOP_CONFIG_BYTES, LOOP_FLAGS_OFFSET = 304, 60  # struct loop_config: fd, block size, loop_info64

_libc = ctypes.CDLL(None, use_errno=True)


def _check(code: int, what: str) -> None:
    if code < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare_all() -> bool:
    """New mount and pid namespaces, inside a new user namespace unless root. True when root.

    The pid namespace begins with the next fork.
    """
    root = os.geteuid() == 0
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | CLONE_NEWPID | (0 if root else CLONE_NEWUSER)
    _check(_libc.unshare(flags), "unshare")
    if not root:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    return root


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2). Raises OSError that names the target."""
    code = _libc.mount(
        source.encode(), os.fsencode(target), kind.encode(), flags, os.fsencode(data)
    )
    _check(code, f"mount {kind or source} on {target}")


def unmount(target: str, lazy: bool = False) -> None:
    """umount2(2). Raises OSError that names the target."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH if lazy else 0), f"unmount {target}")


def set_process_name(name: str) -> None:
    """What `ps` shows in its short column."""
    _libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def mount_overlay(folder: str, lowers: list[str], upper: str, work: str, root: bool) -> None:
    """Overlay on `folder`; `lowers` lists the topmost first.

    Paths are relative to the working directory: the option string of mount(2) has to fit a page.
    Raises OSError(E2BIG) when it does not.
    """
    data = f"lowerdir={':'.join(lowers)},upperdir={upper},workdir={work}"
    data += "" if root else ",userxattr"
    if len(data) >= 4096:
        raise OSError(errno.E2BIG, f"{len(lowers)} layers do not fit one overlay mount")
    mount("overlay", folder, "overlay", 0, data)


def attach_loop(file: Path, read_only: bool) -> str:
    """A loop device on `file` that frees itself with its last user. Raises OSError."""
    backing = os.open(file, os.O_RDONLY if read_only else os.O_RDWR)
    control = os.open("/dev/loop-control", os.O_RDWR)
    try:
        config = bytearray(LOOP_CONFIG_BYTES)
        struct.pack_into("II", config, 0, backing, 4096)
        flags = LO_AUTOCLEAR | (LO_READ_ONLY if read_only else 0)
        struct.pack_into("I", config, LOOP_FLAGS_OFFSET, flags)
        for _ in range(200):
            device = f"/dev/loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
            handle = os.open(device, os.O_RDONLY if read_only else os.O_RDWR)
            try:
                fcntl.ioctl(handle, LOOP_CONFIGURE, bytes(config))
            except OSError as error:
                os.close(handle)
                if error.errno != errno.EBUSY:  # another process was faster: take the next
                    raise
                continue
            return f"{device}:{handle}"
        raise OSError(errno.EBUSY, "no free loop device")
    finally:
        os.close(control)
        os.close(backing)


def mount_image(file: Path, folder: str, read_only: bool) -> None:
    """Mount an ext4 image file on `folder`."""
    device, _, handle = attach_loop(file, read_only).partition(":")
    try:
        if read_only:
            mount(device, folder, "ext4", MS_RDONLY | MS_NOSUID | MS_NODEV, "noload")
        else:
            mount(device, folder, "ext4", 0, "discard")
    finally:
        os.close(int(handle))  # from here the mount alone keeps the device
