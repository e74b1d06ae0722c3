"""Figures as inline SVG. Colours come from the page's style sheet, so light and dark both work."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from openk3.report.figures import Bars, Figure, HeatMap, LineChart, Number, Series
from openk3.report.scale import Scale, fit, short

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 44
LEGEND = 22
"""Height of the line above the plot that holds a legend or a colour bar."""
NUM_COLOURS = 8


def draw(figure: Figure) -> str:
    """The figure as one `<svg>` element that says its title to screen readers."""
    kinds = {LineChart: _line_chart, HeatMap: _heat_map, Bars: _bars}
    height, body = kinds[type(figure)](figure)
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(figure.title)}">'
    return "\n".join([head, *body, "</svg>"])


class Frame:
    """The plot area and how data falls into it."""

    def __init__(self, x: Scale, y: Scale, top: float = TOP) -> None:
        self.x, self.y = x, y
        self.top, self.right, self.bottom = top, WIDTH - RIGHT, HEIGHT - BOTTOM

    def at_x(self, value: float) -> float:
        return LEFT + self.x(value) * (self.right - LEFT)

    def at_y(self, value: float) -> float:
        return self.bottom - self.y(value) * (self.bottom - self.top)

    def axes(self, x_label: str, y_label: str, *, whole_x: bool = False) -> Iterator[str]:
        """Grid lines, ticks (whole numbers along x if asked) and the two labels."""
        for value in self.y.ticks():
            y = self.at_y(value)
            yield line("grid", LEFT, y, self.right, y)
            yield text(LEFT - 6, y + 4, short(value), "end")
        for value in self.x.ticks(6, whole=whole_x):
            x = self.at_x(value)
            yield line("axis", x, self.bottom, x, self.bottom + 4)
            yield text(x, self.bottom + 17, short(value), "middle")
        yield line("axis", LEFT, self.bottom, self.right, self.bottom)
        yield from labels(x_label, y_label, self.top, self.bottom)


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight line of a style-sheet class."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    """A `<text>` element, escaped."""
    extra = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def labels(x_label: str, y_label: str, top: float, bottom: float) -> Iterator[str]:
    """Names of the axes: x below its middle, y upright beside its middle."""
    yield text((LEFT + WIDTH - RIGHT) / 2, bottom + 35, x_label, "middle", "label")
    middle = (top + bottom) / 2
    yield (
        f'<text class="label" text-anchor="middle" '
        f'transform="translate(13 {middle:.1f}) rotate(-90)">{escape(y_label)}</text>'
    )


def _line_chart(chart: LineChart) -> tuple[int, list[str]]:
    ys = [y for s in chart.series for y in s.y if y is not None] + [y for y, _ in chart.levels]
    named = [s for s in chart.series if s.style != "faint"]
    legend = list(_legend(named)) if len(named) > 1 else []
    scale = fit(ys, log=chart.log_y, from_zero=chart.from_zero)
    frame = Frame(_x_scale(chart), scale, TOP + LEGEND if legend else TOP)
    whole = all(float(x).is_integer() for s in chart.series for x in s.x)
    body = [*frame.axes(chart.x_label, chart.y_label, whole_x=whole), *_rules(chart, frame)]
    for series in chart.series:
        body += _curve(series, frame, chart.log_y)
    return HEIGHT, [*body, *_levels(chart, frame), *_marks(chart, frame), *legend]


def _x_scale(chart: LineChart) -> Scale:
    xs = [x for s in chart.series for x in s.x]
    if not xs or min(xs) == max(xs):
        return fit(xs)
    low, high = min(xs), max(xs)
    return Scale(0.0 if 0 <= low < 0.1 * high else low, high)


def _rules(chart: LineChart, frame: Frame) -> Iterator[str]:
    for place, word in chart.rules:
        x = frame.at_x(place)
        yield line("rule", x, frame.top, x, frame.bottom)
        yield text(x + 4, frame.top + 9, word, "start", "small")


def _levels(chart: LineChart, frame: Frame) -> Iterator[str]:
    """Level lines, and their words pushed upwards where they would touch."""
    free = frame.bottom
    for value, word in sorted(chart.levels):
        y = frame.at_y(value)
        yield line("rule", LEFT, y, frame.right, y)
        free = min(y - 4, free - 12)
        yield text(frame.right - 3, free, f"{word} {short(value)}", "end", "small")


def _marks(chart: LineChart, frame: Frame) -> Iterator[str]:
    for place, reason in chart.marks:
        x, y = frame.at_x(place), frame.bottom - 7
        yield (
            f'<path class="bad" d="M{x - 4:.1f} {y - 4}l8 8m0 -8l-8 8">'
            f"<title>{escape(reason)}</title></path>"
        )


def _curve(series: Series, frame: Frame, log: bool) -> Iterator[str]:
    colour = f"c{series.colour % NUM_COLOURS}"
    style = "faint" if series.style == "faint" else "line"
    points: list[tuple[float, float]] = []
    for run in _unbroken(series.x, series.y, log):
        placed = [(frame.at_x(x), frame.at_y(y)) for x, y in run]
        points += placed
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        yield f'<path class="{style} {colour}" d="M{path}"/>'
    if series.style == "points" or len(points) == 1:
        for (x, y), (at, value) in zip(points, _present(series.x, series.y, log), strict=True):
            told = f"{series.name} {short(value)} at {short(at)}"
            yield (
                f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
                f"<title>{escape(told)}</title></circle>"
            )


def _present(xs: Sequence[float], ys: Sequence[Number], log: bool) -> list[tuple[float, float]]:
    return [point for run in _unbroken(xs, ys, log) for point in run]


def _unbroken(
    xs: Sequence[float], ys: Sequence[Number], log: bool
) -> Iterator[list[tuple[float, float]]]:
    run: list[tuple[float, float]] = []
    for x, y in zip(xs, ys, strict=True):
        if y is not None and math.isfinite(y) and (y > 0 or not log):
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _legend(series: Sequence[Series]) -> Iterator[str]:
    x = float(LEFT)
    for item in series:
        yield line(f"line c{item.colour % NUM_COLOURS}", x, 14, x + 16, 14)
        yield text(x + 21, 18, item.name)
        x += 38 + 6.4 * len(item.name)


def _bars(chart: Bars) -> tuple[int, list[str]]:
    frame = Frame(Scale(chart.edges[0], chart.edges[-1]), fit(chart.heights, from_zero=True))
    body = list(frame.axes(chart.x_label, chart.y_label))
    for low, high, value in zip(chart.edges, chart.edges[1:], chart.heights, strict=False):
        x, y = frame.at_x(low), frame.at_y(value)
        width = max(frame.at_x(high) - x - 1, 0.5)
        told = f"{short(low)} to {short(high)}: {short(value)}"
        body.append(
            f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{frame.bottom - y:.1f}"><title>{escape(told)}</title></rect>'
        )
    return HEIGHT, body


def _heat_map(chart: HeatMap) -> tuple[int, list[str]]:
    num_rows, num_columns = len(chart.rows), len(chart.columns)
    cell = min(22.0, max(3.0, 420 / max(num_rows, 1)))
    left = LEFT - 20 + min(6.5 * max(len(row) for row in chart.rows), 90)
    top, wide = TOP + LEGEND, (WIDTH - RIGHT - left) / num_columns
    bottom = top + cell * num_rows
    body = list(_colour_bar(chart))
    for i, row in enumerate(chart.values):
        for j, value in enumerate(row):
            if value is not None:
                place = (left + j * wide, top + i * cell, wide, cell)
                told = f"{chart.rows[i]}, {chart.columns[j]}: {short(value)}"
                body.append(_cell(place, value, chart, told))
    for i in _every(num_rows, 13 / cell):
        body += [text(left - 5, top + (i + 0.5) * cell + 4, chart.rows[i], "end")]
    longest = max(len(column) for column in chart.columns)
    for j in _every(num_columns, (6.6 * longest + 6) / wide):
        body += [text(left + (j + 0.5) * wide, bottom + 15, chart.columns[j], "middle")]
    height = math.ceil(bottom) + BOTTOM
    return height, [*body, *labels(chart.x_label, chart.y_label, top, bottom)]


def _every(count: int, least: float) -> range:
    """Which of `count` labels to write so that each has room for `least` cells."""
    rounds = (m * 10**p for p in range(6) for m in (1, 2, 4))
    return range(0, count, next(step for step in rounds if step >= least))


def _cell(place: tuple[float, float, float, float], value: float, chart: HeatMap, told: str) -> str:
    x, y, width, height = place
    colour, strength = shade(value, chart)
    gap = 0.5 if min(width, height) > 4 else 0.0
    return (
        f'<rect class="{colour}" fill-opacity="{strength:.2f}" x="{x:.1f}" y="{y:.1f}" '
        f'width="{width - gap:.1f}" height="{height - gap:.1f}">'
        f"<title>{escape(told)}</title></rect>"
    )


def shade(value: float, chart: HeatMap) -> tuple[str, float]:
    """(class, opacity) of a cell: `hot` above the centre, `cold` below it."""
    centre = chart.low if chart.centre is None else chart.centre
    end = chart.high if value >= centre else chart.low
    strength = (value - centre) / (end - centre) if end != centre else 0.0
    colour = "cold" if value < centre or chart.centre is None else "hot"
    return colour, 0.04 + 0.96 * min(max(strength, 0.0), 1.0)


def _colour_bar(chart: HeatMap) -> Iterator[str]:
    steps, wide, x = 24, 5, WIDTH - RIGHT - 24 * 5 - 40
    yield text(x - 5, 18, short(chart.low), "end", "small")
    for i in range(steps):
        value = chart.low + (chart.high - chart.low) * (i + 0.5) / steps
        colour, strength = shade(value, chart)
        yield (
            f'<rect class="{colour}" fill-opacity="{strength:.2f}" x="{x + i * wide}" y="8" '
            f'width="{wide}" height="11"/>'
        )
    yield text(x + steps * wide + 5, 18, short(chart.high), "start", "small")
