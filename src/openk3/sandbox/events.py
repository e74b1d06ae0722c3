"""Structured events: one JSON line each in `events.jsonl` of the home, appended by any process."""

import json
import os
import time
from contextlib import suppress
from typing import Any

from openk3.sandbox.store.home import Home

MAX_BYTES = 16 << 20  # then the file becomes events.jsonl.1


def emit(home: Home, event: str, sandbox_id: str, **fields: Any) -> None:
    """Append one event; lines of concurrent writers do not mix."""
    row = {"time": time.time(), "event": event, "sandbox_id": sandbox_id, **fields}
    line = json.dumps(row, default=str)[:3500].encode() + b"\n"
    path = home.path / "events.jsonl"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, line)
        full = os.fstat(handle).st_size > MAX_BYTES
    finally:
        os.close(handle)
    if full:
        with suppress(FileNotFoundError):  # another process did it at the same time
            os.replace(path, path.with_suffix(".jsonl.1"))


def read(home: Home, sandbox_id: str | None = None) -> list[dict[str, Any]]:
    """Events in order, of one sandbox or of all."""
    rows = []
    for name in ("events.jsonl.1", "events.jsonl"):
        path = home.path / name
        if not path.exists():
            continue
        for line in path.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # cut at the length limit
            if sandbox_id in (None, row.get("sandbox_id")):
                rows.append(row)
    return rows
