"""A run as a reader sees it: its folder's rows, thinned and smoothed for plots."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openk3.obs import run as run_folder
from openk3.obs.metrics import read_rows
from openk3.report.figures import Number

AXES: dict[str, tuple[str, str]] = {
    "step": ("step", "step"),
    "tokens": ("tokens", "training tokens"),
    "flops": ("flops", "training FLOPs"),
    "time": ("seconds", "wall time"),
}
"""What an x-axis may show: its name -> (field of a row, label)."""


@dataclass(frozen=True)
class History:
    """Everything a report reads."""

    name: str
    config: dict[str, Any]
    attempts: list[dict[str, Any]]
    rows: list[dict[str, Any]]

    @classmethod
    def load(cls, folder: str | Path) -> "History":
        """Read a run folder. Raises ConfigError when it is none, DataError on bad metrics."""
        folder = Path(folder)
        saved = run_folder.read_config(folder)
        rows = read_rows(folder / "metrics.jsonl")
        name = folder.resolve().name
        return cls(name, saved["config"], run_folder.read_env(folder), rows)

    def steps(self) -> list[dict[str, Any]]:
        """The step rows; a skipped step has no loss and no gradient norm to draw."""
        gone = {"loss": None, "bits_per_byte": None, "grad_norm": None}
        return [row | gone if row.get("bad") else row for row in self.of("step")]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The rows of one kind, in order."""
        return [row for row in self.rows if row.get("kind") == kind]

    def groups(self, kind: str, key: str) -> dict[Any, list[dict[str, Any]]]:
        """The rows of one kind by the value of a field, in the order of first appearance."""
        found: dict[Any, list[dict[str, Any]]] = {}
        for row in self.of(kind):
            found.setdefault(row.get(key), []).append(row)
        return found

    def summary(self) -> dict[str, Any]:
        """The numbers a person asks first; None where the run does not say."""
        steps, total = self.steps(), find(self.config, "steps")
        last = steps[-1] if steps else {}
        losses = [row["loss"] for row in steps[-50:] if finite(row.get("loss"))]
        speeds = [row["tokens_per_s"] for row in steps[3:] if finite(row.get("tokens_per_s"))]
        return {
            "run": self.name,
            "steps": last.get("step", 0),
            "total_steps": total if isinstance(total, int) else None,
            "loss": statistics.fmean(losses) if losses else None,
            "bits_per_byte": {
                split: {"last": rows[-1]["bits_per_byte"], "best": _best(rows)}
                for split, rows in self.groups("eval", "split").items()
            },
            "baselines": {row["name"]: row["bits_per_byte"] for row in self.of("baseline")},
            "tokens": last.get("tokens", 0),
            "flops": last.get("flops", 0),
            "seconds": last.get("seconds", 0),
            "tokens_per_s": statistics.median(speeds) if speeds else None,
            "skipped_steps": sum(bool(row.get("bad")) for row in steps),
            "attempts": len(self.attempts),
        }


def _best(rows: list[dict[str, Any]]) -> float | None:
    return min((r["bits_per_byte"] for r in rows if finite(r["bits_per_byte"])), default=None)


def finite(value: Any) -> bool:
    """Whether `value` is a number that can be drawn."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def find(config: dict[str, Any], name: str) -> Any:
    """A setting by its own name, wherever in a configuration it stands, or None."""
    for key, value in config.items():
        if key == name:
            return value
        if isinstance(value, dict) and (found := find(value, name)) is not None:
            return found
    return None


def time_unit(seconds: float) -> tuple[float, str]:
    """(seconds of a unit, its name) in which a duration reads best."""
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return size, name
    return 1.0, "seconds"


def smooth(values: Sequence[Number], window: int) -> list[Number]:
    """Exponential mean over about `window` values, unbiased at the start; gaps stay gaps."""
    keep, mean, weight = 1 - 2 / (window + 1), 0.0, 0.0
    out: list[Number] = []
    for value in values:
        if value is None or not math.isfinite(value):
            out.append(None)
            continue
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(mean / weight)
    return out


def thin(
    xs: Sequence[float], ys: Sequence[Number], limit: int = 600
) -> tuple[list[float], list[Number]]:
    """At most about `limit` points that keep the lowest and the highest of every stretch."""
    if len(xs) <= limit:
        return list(xs), list(ys)
    kept = [0]
    stretch = 2 * len(xs) / limit
    for i in range(limit // 2):
        span = range(int(i * stretch), min(int((i + 1) * stretch), len(xs)))
        known = sorted((y, j) for j in span if (y := ys[j]) is not None)
        kept += [known[0][1], known[-1][1]] if known else span[:1]
    kept = sorted({*kept, len(xs) - 1})
    return [xs[j] for j in kept], [ys[j] for j in kept]
