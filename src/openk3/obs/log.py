"""Logging: short lines for people on stderr, the same lines with time and place in a file.

stdout is left to what a verb is asked to print, so that `--json` output stays clean.
"""

import logging
import sys
from pathlib import Path
from typing import TextIO

ROOT = "openk3"


def get(name: str = "") -> logging.Logger:
    """The project's logger, or the one of a part of it: `get("train")`."""
    return logging.getLogger(f"{ROOT}.{name}" if name else ROOT)


class _Short(logging.Formatter):
    """The message alone; from WARNING up, with its level; on other ranks, with the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        level = f"{record.levelname}: " if record.levelno > logging.INFO else ""
        return f"{f'[rank {self.rank}] ' if self.rank else ''}{level}{text}"


def setup(
    file: str | Path | None = None,
    *,
    quiet: bool = False,
    rank: int = 0,
    stream: TextIO | None = None,
) -> None:
    """Send the project's log to `stream` (stderr) and, appended, to `file`.

    Ranks other than 0, and `quiet`, say only warnings. Calling again replaces what was set.
    """
    logger = get()
    close()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    console = logging.StreamHandler(stream if stream is not None else sys.stderr)
    console.setLevel(logging.WARNING if quiet or rank else logging.INFO)
    console.setFormatter(_Short(rank))
    logger.addHandler(console)
    if file is not None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        kept = logging.FileHandler(file, encoding="utf-8")
        kept.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(kept)


def close() -> None:
    """Remove and close the handlers that `setup` added."""
    logger = get()
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
