"""Optional trackers beside metrics.jsonl. Each is imported only when a run names it.

They receive the scalars of every row under names like `step/loss` and `balance/3/max_violation`;
lists and texts stay in the file.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openk3.errors import BackendError, ConfigError, nearest
from openk3.obs.metrics import Sink

AXES = ("step", "tokens", "flops", "seconds")


class ScalarSink:
    """Sends a row's scalars to `send(values, step)`."""

    def __init__(
        self, send: Callable[[dict[str, float], int], Any], close: Callable[[], Any]
    ) -> None:
        self._send, self._close = send, close

    def log(self, row: Mapping[str, Any]) -> None:
        if values := scalars(row):
            self._send(values, row["step"])

    def close(self) -> None:
        self._close()


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a row by tracker name, the other x-axes among them for step rows."""
    place = [row["kind"], *(str(row[key]) for key in ("split", "layer") if key in row)]
    skip = {"step", "layer"} if row["kind"] == "step" else {*AXES, "layer"}
    return {
        "/".join([*place, key]): value
        for key, value in row.items()
        if key not in skip and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _wandb(folder: Path, run_id: str, config: Mapping[str, Any]) -> Sink:
    wandb = _need("wandb")
    run = wandb.init(
        project="openk3", name=folder.name, id=run_id, resume="allow", dir=folder, config=config
    )
    return ScalarSink(lambda values, step: run.log(values, step=step), run.finish)


def _trackio(folder: Path, run_id: str, config: Mapping[str, Any]) -> Sink:
    trackio = _need("trackio")
    name = f"{folder.name}-{run_id}"
    trackio.init(project="openk3", name=name, resume="allow", config=dict(config))
    return ScalarSink(lambda values, step: trackio.log(values, step=step), trackio.finish)


def _tensorboard(folder: Path, run_id: str, config: Mapping[str, Any]) -> Sink:
    writer = _need("tensorboard.summary").Writer(str(folder / "tensorboard"))

    def send(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return ScalarSink(send, writer.close)


SINKS: dict[str, Callable[[Path, str, Mapping[str, Any]], Sink]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "tensorboard": _tensorboard,
}


def require(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown tracker, BackendError for one that is not installed."""
    for name in names:
        if name not in SINKS:
            raise ConfigError(
                f"no tracker {name!r}{nearest(name, set(SINKS))}; there are {', '.join(SINKS)}"
            )
        _need(name)


def make(
    names: Sequence[str], folder: str | Path, run_id: str, config: Mapping[str, Any]
) -> list[Sink]:
    """The sinks of those names for a run. Raises as `require` does."""
    require(names)
    return [SINKS[name](Path(folder), run_id, config) for name in names]


def _need(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendError(
            f"tracker {module.partition('.')[0]!r} is not installed: pip install 'openk3[track]'"
        ) from error
