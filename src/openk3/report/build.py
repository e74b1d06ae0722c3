"""Which figures a run gives: rows in, figures out. A figure without rows is left out."""

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from openk3.report.figures import Bars, Figure, HeatMap, LineChart, Number, Series
from openk3.report.history import AXES, History, finite, smooth, thin, time_unit

MAX_COLUMNS = 64


def over_time(history: History, axis: str) -> list[LineChart]:
    """Curves of the whole run over one of AXES."""
    makers = (_loss, _bits_per_byte, _lr, _grad_norm, _throughput, _violation, _max_logit, _memory)
    place = Place(history, axis)
    return [chart for make in makers if (chart := make(history, place)) is not None]


def of_the_model(history: History) -> list[Figure]:
    """What the inside of the model looks like, over layers."""
    makers: tuple[Callable[[History], Figure | None], ...] = (
        _expert_load,
        _violation_map,
        _decay_bars,
        _decay_map,
        _attn_res,
    )
    return [figure for make in makers if (figure := make(history)) is not None]


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
    levels = [(row["bits_per_byte"], row["name"]) for row in history.of("baseline")]
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


def _last_by_layer(history: History, kind: str) -> dict[int, dict[str, Any]]:
    groups = history.groups(kind, "layer")
    return {layer: groups[layer][-1] for layer in sorted(groups)}


def _expert_load(history: History) -> HeatMap | None:
    layers = {i: row for i, row in _last_by_layer(history, "balance").items() if sum(row["load"])}
    if not layers:
        return None
    num_experts = max(len(row["load"]) for row in layers.values())
    grouped = num_experts > MAX_COLUMNS
    values = [_relative_load(row["load"], grouped) for row in layers.values()]
    step = next(iter(layers.values()))["step"]
    order = "experts, busiest first, averaged in groups" if grouped else "expert"
    return HeatMap(
        name="expert_load",
        title=f"Expert load at step {step}",
        x_label=order,
        y_label="layer",
        columns=[str(j) for j in range(len(values[0]))],
        rows=[str(layer) for layer in layers],
        values=values,
        low=0.0,
        high=max(2.0, max(v for row in values for v in row if v is not None)),
        centre=1.0,
        note="Tokens received since the row before, over the layer's mean: 1 is a fair share.",
    )


def _relative_load(load: list[int], grouped: bool) -> list[Number]:
    mean = sum(load) / len(load)
    if not grouped:
        return [tokens / mean for tokens in load]
    ranked = sorted(load, reverse=True)
    cuts = [len(load) * i // MAX_COLUMNS for i in range(MAX_COLUMNS + 1)]
    return [statistics.fmean(ranked[a:b]) / mean for a, b in itertools.pairwise(cuts)]


def _violation_map(history: History) -> HeatMap | None:
    layers = history.groups("balance", "layer")
    steps = sorted({row["step"] for rows in layers.values() for row in rows})
    if len(steps) < 2 or len(layers) < 2:
        return None
    shown = steps[:: -(-len(steps) // 40)]
    values = []
    for layer in sorted(layers):
        at = {row["step"]: row["max_violation"] for row in layers[layer]}
        values.append([at.get(step) for step in shown])
    return HeatMap(
        name="violation_by_layer",
        title="Expert balance by layer",
        x_label="step",
        y_label="layer",
        columns=[str(step) for step in shown],
        rows=[str(layer) for layer in sorted(layers)],
        values=values,
        low=0.0,
        high=max([0.1, *(v for row in values for v in row if v is not None)]),
        note="max load / mean load - 1 of the tokens since the row before.",
    )


def _attn_res(history: History) -> HeatMap | None:
    rows = history.of("attn_res")
    if not rows:
        return None
    weights = rows[-1]["weights"]
    widest = max(len(sources) for sources in weights.values())
    blocks = ["embedding", *(f"block {i}" for i in range(1, widest - 1))]
    return HeatMap(
        name="attn_res",
        title=f"AttnRes weights at step {rows[-1]['step']}",
        x_label="source",
        y_label="mix",
        columns=[*blocks[: widest - 1], "running"],
        rows=[site.removeprefix("layers.") for site in weights],
        values=[_aligned(sources, widest) for sources in weights.values()],
        low=0.0,
        high=1.0,
        note="Mean softmax weight each sublayer gives to the finished blocks and the running sum.",
    )


def _aligned(sources: list[float], widest: int) -> list[Number]:
    """Bank entries at the left, nothing between, the running sum at the right."""
    return [*sources[:-1], *[None] * (widest - len(sources)), sources[-1]]


def _decay_bars(history: History) -> Bars | None:
    layers = _last_by_layer(history, "decay")
    if not layers:
        return None
    edges = next(iter(layers.values()))["edges"]
    sums = [sum(column) for column in zip(*(row["counts"] for row in layers.values()), strict=True)]
    total = sum(sums) or 1
    return Bars(
        name="decay",
        title="KDA log-decay, all layers",
        x_label="log-decay of one step: 0 remembers, -5 forgets",
        y_label="share of channels and tokens",
        edges=edges,
        heights=[count / total for count in sums],
    )


def _decay_map(history: History) -> HeatMap | None:
    layers = _last_by_layer(history, "decay")
    if len(layers) < 2:
        return None
    edges = next(iter(layers.values()))["edges"]
    values = []
    for row in layers.values():
        total = sum(row["counts"]) or 1
        values.append([count / total for count in row["counts"]])
    return HeatMap(
        name="decay_by_layer",
        title="KDA log-decay by layer",
        x_label="log-decay of one step",
        y_label="layer",
        columns=[f"{(a + b) / 2:.2f}" for a, b in itertools.pairwise(edges)],
        rows=[str(layer) for layer in layers],
        values=values,
        low=0.0,
        high=max(v for row in values for v in row) or 1.0,
    )


def all_figures(history: History, axis: str = "step") -> Iterator[Figure]:
    """Every figure of a run, curves over one axis."""
    yield from over_time(history, axis)
    yield from of_the_model(history)
