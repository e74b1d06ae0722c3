"""The same figures as PNG files, drawn by matplotlib (the `plot` extra)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from openk3._io import atomic_file
from openk3.errors import BackendError
from openk3.report.figures import Bars, Figure, HeatMap, LineChart
from openk3.report.scale import fit, short

PALETTE = ("#1f5fa8", "#c2570c", "#2e7d32", "#7b3fa0", "#b3261e", "#00727a", "#7a5230", "#5f6b7a")


def available() -> bool:
    """Whether matplotlib can be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def save(figure: Figure, path: Path) -> None:
    """Draw one figure into a PNG file. Raises BackendError without matplotlib."""
    if not available():
        raise BackendError("PNG plots need matplotlib: pip install 'openk3[plot]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(7.2, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    axes.set_title(figure.title, loc="left", fontweight="bold", fontsize=11)
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)
    painters: dict[type, Callable[[Any, Any], None]] = {
        LineChart: _line_chart,
        HeatMap: _heat_map,
        Bars: _bars,
    }
    painters[type(figure)](figure, axes)
    with atomic_file(path) as handle:
        canvas.savefig(handle, format="png")


def _line_chart(chart: LineChart, axes: Any) -> None:
    for series in chart.series:
        colour = PALETTE[series.colour % len(PALETTE)]
        ys = [float("nan") if y is None else y for y in series.y]
        faint, dots = series.style == "faint", series.style == "points" or len(ys) == 1
        look = (
            {"alpha": 0.3, "linewidth": 0.8} if faint else {"linewidth": 1.6, "label": series.name}
        )
        axes.plot(series.x, ys, color=colour, marker="o" if dots else None, markersize=3, **look)
    seen = [y for s in chart.series for y in s.y if y is not None] + [y for y, _ in chart.levels]
    limits = fit(seen, log=chart.log_y, from_zero=chart.from_zero)
    axes.set_yscale("log" if chart.log_y else "linear")
    axes.set_ylim(limits.low, limits.high)
    for place, word in chart.rules:
        axes.axvline(place, color="#9aa4ae", linestyle="--", linewidth=0.8)
        axes.annotate(
            word, (place, limits.low), fontsize=7, color="#5c6670", ha="right", va="bottom"
        )
    step, free = 0.045 * (limits.high - limits.low), limits.low
    for value, word in sorted(chart.levels):
        axes.axhline(value, color="#9aa4ae", linestyle="--", linewidth=0.8)
        free = max(value, free + step)  # beside the axes, pushed up where words would touch
        look = {"fontsize": 7, "color": "#5c6670", "ha": "left", "va": "center"}
        told = f"{word} {short(value)}"
        axes.annotate(told, (1.01, free), xycoords=("axes fraction", "data"), **look)
    if chart.marks:
        xs = [place for place, _ in chart.marks]
        axes.plot(xs, [limits.low] * len(xs), "x", color=PALETTE[4], clip_on=False)
    axes.grid(axis="y", color="#e3e7eb")
    axes.spines[["top", "right"]].set_visible(False)
    if sum(s.style != "faint" for s in chart.series) > 1:
        axes.legend(frameon=False, fontsize=8)


def _heat_map(chart: HeatMap, axes: Any) -> None:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, Normalize, TwoSlopeNorm

    values = np.array([[np.nan if v is None else v for v in row] for row in chart.values])
    if chart.centre is None:
        colours, norm = ["#f5f7f9", PALETTE[0]], Normalize(chart.low, chart.high)
    else:
        colours = [PALETTE[0], "#f5f7f9", PALETTE[1]]
        norm = TwoSlopeNorm(chart.centre, chart.low, chart.high)
    scale = LinearSegmentedColormap.from_list("openk3", colours)
    image = axes.imshow(values, aspect="auto", cmap=scale, norm=norm, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, pad=0.02)
    longest = max(len(column) for column in chart.columns)
    for ticks, labels, room in (
        (axes.set_xticks, chart.columns, max(1, 60 // longest)),
        (axes.set_yticks, chart.rows, 24),
    ):
        every = max(1, -(-len(labels) // room))
        ticks(range(0, len(labels), every), labels[::every], fontsize=7)


def _bars(chart: Bars, axes: Any) -> None:
    axes.stairs(chart.heights, chart.edges, fill=True, color=PALETTE[0])
    axes.set_xlim(chart.edges[0], chart.edges[-1])
    axes.spines[["top", "right"]].set_visible(False)
