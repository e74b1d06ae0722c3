"""The sandbox home: one folder that holds everything, and the only folder this code deletes from.

    boxes/ID/        box.json (the record), lock, sock, pid, engine.log, live/ (the running upper)
    images/ID/       a committed generation: manifest.json and the memory image; never changed
    layers/ID[.img]  a sealed upper; never changed
    snapshots/ID.json, templates/NAME-HASH/, runtime/HASH/, pages/, bin/, probe-BACKEND.json,
    events.jsonl, keeper.log

A process owns a box while it holds the `flock` on its lock file: the kernel drops it with the
process, so ownership cannot be left behind by a crash and cannot be held twice.
"""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from openk3.errors import ConflictError, NotFoundError, StorageError

ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
FOLDERS = (
    "boxes",
    "images",
    "layers",
    "snapshots",
    "templates",
    "runtime",
    "pages",
    "bin",
    "tmp",
    "mnt",
)


def new_id(prefix: str = "") -> str:
    """Twenty lower-case characters after a prefix; always of one length for one prefix."""
    return prefix + "".join(secrets.choice(ID_LETTERS) for _ in range(20))


def default_home() -> Path:
    """`$OPENK3_SANDBOX_HOME`, or a folder in the user's state directory."""
    if given := os.environ.get("OPENK3_SANDBOX_HOME"):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "openk3" / "sandbox"


class Home:
    """Paths and locks below one home folder, which is made on first use."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path or default_home()).absolute()
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name in FOLDERS:
                (self.path / name).mkdir(exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot use {self.path} for sandboxes: {error}") from error

    def __getattr__(self, name: str) -> Path:
        if name in FOLDERS:
            return self.path / name
        raise AttributeError(name)

    def box(self, box_id: str) -> Path:
        """The folder of a sandbox. Raises NotFoundError for anything that is no id of ours."""
        if not (4 <= len(box_id) <= 40 and set(box_id) <= set(ID_LETTERS)):
            raise NotFoundError(f"{box_id[:60]!r} is no sandbox id")
        return self.boxes / box_id

    @contextmanager
    def using(self) -> Iterator[None]:
        """While any process is inside, no image, layer or page is swept."""
        with open(self.path / "store.lock", "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH)
            yield

    @contextmanager
    def sweeping(self) -> Iterator[bool]:
        """True when nobody is `using` the store and this process alone may sweep it."""
        with open(self.path / "store.lock", "w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


class BoxLock:
    """The exclusive right to change one box. Closing the file, or dying, gives it up."""

    def __init__(
        self, folder: Path, wait_s: float = 0.0, in_vain: Callable[[], bool] | None = None
    ) -> None:
        """Raises ConflictError after `wait_s` seconds, or once waiting is `in_vain`."""
        end = time.monotonic() + wait_s
        while True:
            self.handle = self._try(folder)
            if self.handle is not None:
                return
            if time.monotonic() >= end or (in_vain and in_vain()):
                raise ConflictError(f"sandbox {folder.name} is running or busy")
            time.sleep(0.005)

    @staticmethod
    def _try(folder: Path) -> int | None:
        try:
            handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise NotFoundError(f"no sandbox {folder.name}") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here = os.stat(folder / "lock")
        except (BlockingIOError, FileNotFoundError):
            os.close(handle)
            return None
        if here.st_ino != os.fstat(handle).st_ino:  # deleted and made anew while we waited
            os.close(handle)
            return None
        return handle

    def release(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


def start_time(pid: int, proc: int | None = None) -> str:
    """When a process started, in the kernel's ticks: with its id it names it for ever.

    proc: an open /proc to look in, when the visible one belongs to another pid namespace.
    """
    name = f"/proc/{pid}/stat" if proc is None else f"{pid}/stat"
    with open(os.open(name, os.O_RDONLY, dir_fd=proc), encoding="utf-8") as handle:
        return handle.read().rpartition(")")[2].split()[19]


def is_owned(folder: Path) -> bool:
    """Whether some process holds this box's lock right now."""
    try:
        BoxLock(folder).release()
    except ConflictError:
        return True
    except NotFoundError:
        return False
    return False


def mounts_below(path: Path) -> list[str]:
    """Mount points at or below `path` that this process can see, deepest first."""
    inside = str(path.resolve())
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split(" ")[4].encode().decode("unicode_escape")
        if point == inside or point.startswith(inside + "/"):
            found.append(point)
    return sorted(found, key=len, reverse=True)


def remove_tree(path: Path, within: Path) -> None:
    """Delete a file or folder that lies strictly inside `within` and holds no mount.

    Raises StorageError rather than delete through a mount: a container's root may be there.
    """
    place = path.parent.resolve() / path.name
    if within.resolve() not in place.parents:
        raise StorageError(f"refusing to delete {path}: it is not inside {within}")
    if not os.path.lexists(place):
        return
    if place.is_symlink() or not place.is_dir():
        place.unlink(missing_ok=True)
        return
    if points := mounts_below(place):
        raise StorageError(f"refusing to delete {path}: {points[0]} is mounted there")
    device = os.lstat(place).st_dev
    for folder, names, _ in os.walk(place):
        for name in names:
            if os.lstat(os.path.join(folder, name)).st_dev != device:
                raise StorageError(f"refusing to delete {folder}/{name}: another file system")
    aside = place
    if place.parent != within.resolve() / "tmp":
        aside = within.resolve() / "tmp" / f"gone-{secrets.token_hex(6)}"
        aside.parent.mkdir(exist_ok=True)
        os.rename(place, aside)
    _rmtree(aside)


def _rmtree(path: Path) -> None:
    """`shutil.rmtree` that also gets through folders a sandbox made unwritable."""
    if os.geteuid() != 0:
        os.chmod(path, 0o700)
        for folder, names, _ in os.walk(path):
            for name in names:
                inner = os.path.join(folder, name)
                if not os.path.islink(inner):
                    os.chmod(inner, 0o700)
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return  # another process sweeps the same rubbish
    except OSError as error:
        raise StorageError(f"cannot delete {path}: {error}") from error
