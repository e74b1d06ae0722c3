"""What the inside of a model looks like, over layers. A figure without rows is left out."""

import itertools
import statistics
from collections.abc import Callable
from typing import Any

from openk3.report.figures import Bars, Figure, HeatMap, Number
from openk3.report.history import History

MAX_COLUMNS = 64


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
