"""Figures as data: what to draw, said once, drawn by `svg` for pages and by `png` for files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Number = float | None
"""A value, or None where there is none: a line breaks there, a cell stays empty."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve."""

    name: str
    x: Sequence[float]
    y: Sequence[Number]
    style: Literal["line", "faint", "points"] = "line"
    """faint: the raw values behind a smoothed line; points: a line with its points shown."""
    colour: int = 0
    """Place in the palette."""


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Curves over one x-axis."""

    name: str
    """File name of its PNG, without the suffix."""
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_y: bool = False
    from_zero: bool = False
    """Whether the y-axis starts at 0."""
    rules: Sequence[tuple[float, str]] = ()
    """Vertical lines at an x, with a word: resumes."""
    levels: Sequence[tuple[float, str]] = ()
    """Horizontal lines at a y, with a word: baselines."""
    marks: Sequence[tuple[float, str]] = ()
    """Crosses on the x-axis with a reason each: skipped steps."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """A matrix as colours."""

    name: str
    title: str
    x_label: str
    y_label: str
    columns: Sequence[str]
    rows: Sequence[str]
    """Labels, top row first."""
    values: Sequence[Sequence[Number]]
    low: float
    high: float
    centre: float | None = None
    """Where the two colours of a diverging scale meet; None is one colour from low to high."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A histogram."""

    name: str
    title: str
    x_label: str
    y_label: str
    edges: Sequence[float]
    heights: Sequence[float]
    note: str = ""


Figure = LineChart | HeatMap | Bars
