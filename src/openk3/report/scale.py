"""Axes: limits that a single spike cannot ruin, round ticks, short numbers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic map from [low, high] to [0, 1]."""

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Place of `value`, held within the ends."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)

    def ticks(self, count: int = 5, *, whole: bool = False) -> list[float]:
        """About `count` round values within the ends, integers if `whole`."""
        if self.log and len(ticks := log_ticks(self.low, self.high)) >= 2:
            return ticks
        return nice_ticks(self.low, self.high, count, 1.0 if whole else 0.0)


def fit(values: Iterable[float], *, log: bool = False, from_zero: bool = False) -> Scale:
    """A scale that shows `values`, but lets a few extreme ones touch the edge of the plot.

    Extreme is what lies further outside the middle 98% than three times their range.
    """
    seen = sorted(v for v in values if math.isfinite(v) and (v > 0 or not log))
    if not seen:
        return Scale(0.1, 1.0, log) if log else Scale(0.0, 1.0)
    usual = seen[len(seen) // 100], seen[len(seen) - 1 - len(seen) // 100]
    if log:
        room = max(usual[1] / usual[0], 3.0)
        low, high = max(seen[0], usual[0] / room), min(seen[-1], usual[1] * room)
        return Scale(low / 1.2, high * 1.2, log=True)
    room = 3 * (usual[1] - usual[0]) or math.inf
    low, high = max(seen[0], usual[0] - room), min(seen[-1], usual[1] + room)
    low = min(0.0, low) if from_zero else low
    pad = (high - low) * 0.05 or abs(high) * 0.05 or 0.5
    return Scale(low if from_zero else low - pad, high + pad)


def nice_ticks(low: float, high: float, count: int = 5, least: float = 0.0) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, but at least `least`, within [low, high]."""
    rough = max((high - low) / max(count, 1), least)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high]; between them 2 and 5 when there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 6)
    tens = [10.0**p for p in range(first, last + 1, every)]
    wide = [t for t in tens if low <= t <= high]
    if len(wide) >= 3:
        return wide
    return [m * t for t in tens for m in (1, 2, 5) if low <= m * t <= high]


def short(value: float) -> str:
    """`0.25`, `12`, `1.5k`, `20M`, `3e-4`, `2.5e18`: what a tick or a tile has room for."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e15:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    for letter, unit in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= unit * 0.9995:
            return _trim(value / unit) + letter
    return _trim(value)


def _trim(value: float) -> str:
    text = f"{value:.4g}" if abs(value) >= 1 else f"{value:.3g}"
    return text if "e" not in text else f"{value:.0f}"
