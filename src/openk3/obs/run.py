"""The run folder: what a run was, what it ran on, what it measured. docs/runs.md shows it whole.

A folder is a run once it holds config.json. Creating never touches a folder that holds anything;
resuming appends and never overwrites.
"""

import json
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from openk3 import _io
from openk3.errors import ConfigError, StorageError
from openk3.obs import env
from openk3.obs.metrics import MetricsWriter, Sink
from openk3.obs.rows import json_ready

SCHEMA = 1


class RunFolder:
    """A run folder opened for writing by one process. Use `create` or `resume`."""

    def __init__(self, path: Path, attempt: int, saved: dict[str, Any]) -> None:
        self.path = path
        self.attempt = attempt
        """1 for the first process of the run, one more for each resume."""
        self.id: str = saved["id"]
        """A random name that stays with the run."""
        self.config: dict[str, Any] = saved["config"]
        """The resolved configuration, as plain data."""
        self.metrics = MetricsWriter(path / "metrics.jsonl")

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], **facts: Any) -> "RunFolder":
        """Start a run in a new or empty folder, keeping `config` (plain data) and the environment.

        `facts` are added to this attempt's entry in env.json (devices, world size). Raises
        StorageError when the folder holds anything.
        """
        path = Path(path)
        _refuse_clobber(path)
        saved = {
            "schema": SCHEMA,
            "id": secrets.token_hex(6),
            "time": time.time(),
            "config": json_ready(config),
        }
        _io.write_json(path / "config.json", saved)
        return cls(path, 1, saved)._begin(facts)

    @classmethod
    def resume(cls, path: str | Path, step: int | None = None, **facts: Any) -> "RunFolder":
        """Go on with the run in `path`, from `step` if given, else see `metrics.mark_resume`.

        Raises ConfigError when the folder is no run, StorageError when it is still being written.
        """
        path = Path(path)
        saved = read_config(path)
        run = cls(path, len(read_env(path)) + 1, saved)._begin(facts)
        if step is not None:
            run.metrics.mark_resume(step, run.attempt)
        return run

    def _begin(self, facts: Mapping[str, Any]) -> "RunFolder":
        attempts = [*read_env(self.path), env.describe() | json_ready(facts)]
        _io.write_json(self.path / "env.json", {"schema": SCHEMA, "attempts": attempts})
        self.log_path.parent.mkdir(exist_ok=True)
        if diff := env.code_diff():
            name = "code.diff" if self.attempt == 1 else f"code_{self.attempt}.diff"
            with _io.atomic_file(self.path / name, "w") as handle:
                handle.write(diff + "\n")
        return self

    @property
    def log_path(self) -> Path:
        """Log file of this attempt; pass it to `obs.log.setup`."""
        return self.path / "logs" / f"attempt_{self.attempt}.log"

    def add_sinks(self, sinks: Iterable[Sink]) -> None:
        """Send every later metrics row to `sinks` too."""
        self.metrics.sinks.extend(sinks)

    def close(self) -> None:
        """Close the metrics file and its sinks."""
        self.metrics.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def is_run(path: str | Path) -> bool:
    """Whether the folder holds a run."""
    return (Path(path) / "config.json").is_file()


def read_config(path: str | Path) -> dict[str, Any]:
    """A run's config.json: schema, id, time, config. Raises ConfigError."""
    file = Path(path) / "config.json"
    try:
        saved = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is no run folder: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    kinds = {"schema": int, "id": str, "config": dict}
    if not isinstance(saved, dict) or any(
        not isinstance(saved.get(key), kind) for key, kind in kinds.items()
    ):
        raise ConfigError(f"{file} is not a run's: it needs schema, id and config")
    if saved["schema"] > SCHEMA:
        raise ConfigError(f"{file} has schema {saved['schema']}, above {SCHEMA}: upgrade openk3")
    return saved


def read_env(path: str | Path) -> list[dict[str, Any]]:
    """The environments of a run's attempts, first to last; empty before the first."""
    file = Path(path) / "env.json"
    try:
        return [dict(entry) for entry in json.loads(file.read_text("utf-8"))["attempts"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {file}: {error!r}; delete it to go on") from error


def _refuse_clobber(path: Path) -> None:
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"cannot use {path} as a run folder: {error.strerror}") from error
    if "config.json" in names:
        raise StorageError(
            f"{path} already holds a run: pass --resume auto to go on with it, "
            "or choose another folder"
        )
    if names:
        raise StorageError(f"{path} is not empty and is no run folder; choose another folder")
