"""Curves of a run over steps, tokens, FLOPs or time. A curve without rows is left out."""

import statistics
from typing import Any

from openk3.report.figures import LineChart, Series
from openk3.report.history import AXES, History, finite, smooth, thin, time_unit


def over_time(history: History, axis: str) -> list[LineChart]:
    """Curves of the whole run over one of AXES."""
    makers = (_loss, _bits_per_byte, _lr, _grad_norm, _throughput, _violation, _max_logit, _memory)
    place = Place(history, axis)
    return [chart for make in makers if (chart := make(history, place)) is not None]


class Place:
    """Puts rows on one x-axis."""

    def __init__(self, history: History, axis: str) -> None:
        self.field, self.label = AXES[axis]
        self.unit = 1.0
        steps = history.steps()
        if axis == "time" and steps:
            self.unit, name = time_unit(steps[-1]["seconds"])
            self.label = f"wall time, {name}"
        at = {row["step"]: self.x(row) for row in steps}
        resumed = [row["step"] for row in history.of("resume") if row["step"] in at]
        self.rules = tuple((at[step], "resumed") for step in resumed)

    def x(self, row: dict[str, Any]) -> float:
        return row[self.field] / self.unit

    def curve(self, rows: list[dict[str, Any]], field: str, **look: Any) -> Series:
        """One field of rows, thinned."""
        ys = [row[field] if finite(row.get(field)) else None for row in rows]
        xs, ys = thin([self.x(row) for row in rows], ys)
        return Series(x=xs, y=ys, **look)

    def smoothed(self, rows: list[dict[str, Any]], field: str, **look: Any) -> tuple[Series, ...]:
        """One field of rows: faint as it is, and smoothed over a fiftieth of them."""
        ys = smooth([row.get(field) for row in rows], max(10, len(rows) // 50))
        xs, ys = thin([self.x(row) for row in rows], ys)
        strong = Series(x=xs, y=ys, **look)
        return (self.curve(rows, field, style="faint", **look), strong)


def _chart(place: Place, **facts: Any) -> LineChart:
    return LineChart(x_label=place.label, rules=place.rules, **facts)


def _has(rows: list[dict[str, Any]], field: str) -> bool:
    return any(finite(row.get(field)) for row in rows)


def _loss(history: History, place: Place) -> LineChart | None:
    steps = history.steps()
    if not _has(steps, "loss"):
        return None
    series = [*place.smoothed(steps, "loss", name="training", colour=0)]
    for i, (split, rows) in enumerate(history.groups("eval", "split").items()):
        series.append(place.curve(rows, "loss", name=str(split), style="points", colour=1 + i))
    marks = [(place.x(row), f"step {row['step']}: {row['bad']}") for row in steps if row.get("bad")]
    note = f"{len(marks)} steps were skipped (crosses)." if marks else ""
    return _chart(
        place,
        name="loss",
        title="Loss",
        y_label="nats per token",
        series=series,
        marks=marks,
        note=note,
    )


def _bits_per_byte(history: History, place: Place) -> LineChart | None:
    steps, splits = history.steps(), history.groups("eval", "split")
    if not splits:
        return None
    series = (
        list(place.smoothed(steps, "bits_per_byte", name="training"))
        if _has(steps, "bits_per_byte")
        else []
    )
    for i, (split, rows) in enumerate(splits.items()):
        look = {"name": str(split), "style": "points", "colour": 1 + i}
        series.append(place.curve(rows, "bits_per_byte", **look))
    baselines = [row for row in history.of("baseline") if finite(row["bits_per_byte"])]
    levels = [(row["bits_per_byte"], row["name"]) for row in baselines]
    return _chart(
        place,
        name="bits_per_byte",
        title="Bits per byte",
        y_label="bits per byte",
        series=series,
        levels=levels,
    )


def _lr(history: History, place: Place) -> LineChart | None:
    steps = history.steps()
    if not _has(steps, "lr"):
        return None
    series = [place.curve(steps, "lr", name="learning rate", colour=2)]
    return _chart(
        place,
        name="lr",
        title="Learning rate",
        y_label="learning rate",
        series=series,
        from_zero=True,
    )


def _grad_norm(history: History, place: Place) -> LineChart | None:
    steps = history.steps()
    if not _has(steps, "grad_norm"):
        return None
    series = place.smoothed(steps, "grad_norm", name="gradient norm", colour=3)
    return _chart(
        place,
        name="grad_norm",
        title="Gradient norm",
        y_label="global norm before clipping",
        series=series,
        log_y=True,
    )


def _throughput(history: History, place: Place) -> LineChart | None:
    steps = history.steps()
    if not _has(steps, "tokens_per_s"):
        return None
    series = place.smoothed(steps, "tokens_per_s", name="tokens/s", colour=5)
    used = [row["mfu"] for row in steps[3:] if finite(row.get("mfu"))]
    note = f"Median model FLOPs utilisation {statistics.median(used):.1%}." if used else ""
    return _chart(
        place,
        name="throughput",
        title="Throughput",
        y_label="tokens per second",
        series=series,
        from_zero=True,
        note=note,
    )


def _violation(history: History, place: Place) -> LineChart | None:
    by_step = list(history.groups("balance", "step").values())
    if not by_step:
        return None
    spread = [
        {
            **rows[0],
            "worst": max(row["max_violation"] for row in rows),
            "median": statistics.median(row["max_violation"] for row in rows),
        }
        for rows in by_step
    ]
    series = [
        place.curve(spread, "worst", name="worst layer", style="points", colour=4),
        place.curve(spread, "median", name="median layer", style="points", colour=0),
    ]
    return _chart(
        place,
        name="max_violation",
        title="Expert balance",
        y_label="max load / mean load - 1",
        series=series,
        from_zero=True,
        note="0 is perfect balance.",
    )


def _max_logit(history: History, place: Place) -> LineChart | None:
    steps = history.steps()
    if not _has(steps, "max_logit"):
        return None
    series = place.smoothed(steps, "max_logit", name="largest logit", colour=6)
    return _chart(
        place,
        name="max_logit",
        title="Largest attention logit",
        y_label="Gated MLA logit",
        series=series,
    )


def _memory(history: History, place: Place) -> LineChart | None:
    steps = [
        {**row, "gib": row["memory_bytes"] / 2**30}
        for row in history.steps()
        if finite(row.get("memory_bytes"))
    ]
    if not steps:
        return None
    series = [place.curve(steps, "gib", name="peak memory", colour=7)]
    return _chart(
        place, name="memory", title="Peak memory", y_label="GiB", series=series, from_zero=True
    )
