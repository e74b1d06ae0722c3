"""What is true after a crash, and making it tidy: states, orphans, deletions.

Mounts need no sweeping: they live in the keepers' namespaces and go with them. Processes neither,
as each keeper is process 1 of its own pid namespace. Cgroups, records and files are swept here.
"""

import hashlib
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from openk3.errors import ConflictError, NotFoundError, OpenK3Error, StorageError
from openk3.sandbox import events
from openk3.sandbox.keeper import cgroups
from openk3.sandbox.store import gc
from openk3.sandbox.store.home import BoxLock, Home, is_owned, remove_tree, start_time
from openk3.sandbox.store.records import BoxRecord

LOST_KEPT_S = 3600.0  # how long the record of a sandbox that died stays readable


def group_name(home: Home, box_id: str) -> str:
    """Cgroups of all homes share a folder, so the name says whose it is."""
    return f"{hashlib.sha256(str(home.path).encode()).hexdigest()[:8]}-{box_id}"


def settle(home: Home, box_id: str) -> BoxRecord:
    """The record with its true state. `running` without a keeper becomes paused or lost.

    Raises NotFoundError.
    """
    path = BoxRecord.path(home, box_id)
    if not path.exists():
        raise NotFoundError(f"no sandbox {box_id}")
    record = BoxRecord.load(path)
    if record.state != "running" or is_owned(path.parent):
        return record
    try:
        lock = BoxLock(path.parent)
    except ConflictError:
        return BoxRecord.load(path)  # a keeper took it meanwhile
    try:
        record = BoxRecord.load(path)
        if record.state == "running":
            record.state = "paused" if record.own_image else "lost"
            record.reason = "its keeper or the machine died; " + (
                "it is back at its last saved generation"
                if record.own_image
                else "it had never been paused"
            )
            record.deadline = None
            record.save(path)
            events.emit(home, "recovered", box_id, state=record.state)
        return record
    finally:
        lock.release()


def records(home: Home) -> list[BoxRecord]:
    """All sandboxes, oldest first."""
    found = []
    for folder in home.boxes.iterdir():
        try:
            found.append(settle(home, folder.name))
        except NotFoundError:
            continue  # still starting, or deleted while we looked
        except StorageError as error:
            events.emit(home, "damaged", folder.name, reason=str(error))
    return sorted(found, key=lambda record: record.created)


def delete(home: Home, box_id: str) -> None:
    """Delete a sandbox that does not run. Raises ConflictError while a keeper has it."""
    folder = home.box(box_id)
    lock = BoxLock(folder)
    try:
        remove_groups(home, box_id)
        remove_tree(folder, home.path)
    finally:
        lock.release()
    events.emit(home, "deleted", box_id)
    gc.collect(home)


def force_end(home: Home, box_id: str, wait_s: float = 10.0) -> None:
    """Kill the keeper of a sandbox that does not answer; the kernel kills the rest with it."""
    folder = home.box(box_id)
    end = time.monotonic() + wait_s
    while is_owned(folder):
        if (pid := keeper_pid(folder)) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            raise ConflictError(f"the keeper of sandbox {box_id} does not end")
        time.sleep(0.01)


def keeper_pid(folder: Path) -> int | None:
    """The box's keeper, if the process of that number is still it."""
    try:
        pid, started = (folder / "pid").read_text().split()
        return int(pid) if start_time(int(pid)) == started else None
    except (OSError, ValueError):
        return None


def remove_groups(home: Home, box_id: str) -> None:
    """Delete the cgroups of a sandbox without keeper, killing whatever is still in them."""
    for folder in cgroups.groups_named(group_name(home, box_id)):
        for pid in cgroups.processes_in(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        cgroups.remove_groups([folder])


def sweep(home: Home) -> dict[str, int]:
    """Settle every record and remove what nobody owns; counts of what was found."""
    found = {"paused": 0, "running": 0, "lost": 0, "abandoned": 0, "groups": 0, "files": 0}
    for record in records(home):
        found[record.state] = found.get(record.state, 0) + 1
        if record.state == "lost" and time.time() - record.created > LOST_KEPT_S:
            _try_delete(home, record.id)
    for folder in gc.abandoned_boxes(home):
        found["abandoned"] += _try_delete(home, folder.name)
    prefix = group_name(home, "")
    for name in cgroups.all_names():
        box_id = name.removeprefix(prefix)
        if name.startswith(prefix) and not is_owned(home.boxes / box_id):
            remove_groups(home, box_id)
            found["groups"] += 1
    found["files"] = gc.collect(home)
    return found


def _try_delete(home: Home, box_id: str) -> int:
    try:
        delete(home, box_id)
    except OpenK3Error as error:
        events.emit(home, "sweep_failed", box_id, reason=str(error))
        return 0
    return 1
