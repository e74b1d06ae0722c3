"""Ticks are round and inside, a spike does not ruin a plot, thinning keeps extremes."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.report.history import smooth, thin, time_unit
from openk3.report.scale import Scale, fit, log_ticks, nice_ticks, short

finite = st.floats(-1e12, 1e12, allow_nan=False)


@given(low=finite, span=st.floats(1e-3, 1e12), count=st.integers(2, 8))
def test_ticks_are_round_sorted_and_inside(low, span, count):
    high = low + span
    if (high - low) / max(abs(low), abs(high)) < 1e-9:
        return  # no room between neighbouring floats
    ticks = nice_ticks(low, high, count)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else span
    assert 1 <= len(ticks) <= 2 * count + 2
    assert all(low - 1e-6 * span <= t <= high + 1e-6 * span for t in ticks)
    assert all(a < b for a, b in itertools.pairwise(ticks))
    if len(ticks) > 1:
        mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
        assert any(mantissa == pytest.approx(m, rel=1e-3) for m in (1, 2, 5))


def test_ticks_by_example():
    assert nice_ticks(0, 1) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(-0.07, 0.31) == [0.0, 0.1, 0.2, 0.3]
    assert nice_ticks(1, 2, 6, least=1.0) == [1.0, 2.0]
    assert log_ticks(0.05, 300) == [0.1, 1.0, 10.0, 100.0]
    assert log_ticks(0.3, 4) == [0.5, 1.0, 2.0]
    assert Scale(2.4, 4.0, log=True).ticks() == [2.5, 3.0, 3.5, 4.0]


def test_a_spike_touches_the_edge():
    values = [2.0 + i / 1000 for i in range(1000)]
    assert fit([*values, 1e9]).high < 10
    assert fit([*values, 3.2]).high > 3.2
    assert fit([-1e9, *values]).low > -10
    wide = fit([*values, 1e12], log=True)
    assert wide.high < 100
    assert wide(1e12) == 1.0


def test_odd_values():
    assert fit([]) == Scale(0.0, 1.0)
    assert fit([math.nan, math.inf]) == Scale(0.0, 1.0)
    assert fit([-1.0, 0.0], log=True).log
    one = fit([3.0])
    assert one.low < 3.0 < one.high
    zero = fit([0.0, 0.0])
    assert zero.low < zero.high
    assert fit([1.0, 2.0], from_zero=True).low == 0.0


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50), st.booleans())
def test_a_scale_maps_into_the_plot(values, log):
    scale = fit(values, log=log)
    places = [scale(v) for v in sorted(values)]
    assert all(0.0 <= p <= 1.0 for p in places)
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (12, "12"),
        (1500, "1.5k"),
        (999, "999"),
        (1e6, "1M"),
        (2.5e9, "2.5B"),
        (3e12, "3T"),
        (2.5e18, "2.5e18"),
        (3e-4, "3e-4"),
        (-0.5, "-0.5"),
    ],
)
def test_short(value, text):
    assert short(value) == text


def test_smoothing_is_unbiased_and_keeps_gaps():
    assert smooth([2.0, 2.0, None, 2.0], 10) == pytest.approx([2.0, 2.0, None, 2.0])
    out = smooth([0.0] * 50 + [1.0] * 200, 20)
    assert out[49] == 0.0
    assert 0.05 < out[50] < 0.15
    assert out[-1] == pytest.approx(1.0, abs=1e-3)


def test_thinning_keeps_ends_and_extremes():
    xs = list(range(100_000))
    ys = [0.0] * len(xs)
    ys[31_415], ys[77_777] = 9.0, -9.0
    kept, values = thin(xs, ys)
    assert len(kept) <= 602
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (0, 99_999)
    assert {9.0, -9.0} <= set(values)
    assert thin([1, 2], [None, 3.0]) == ([1, 2], [None, 3.0])
    gone, none = thin(xs, [None] * len(xs))
    assert set(none) == {None}
    assert len(gone) <= 602


def test_time_units():
    assert [time_unit(s)[1] for s in (5, 500, 50_000, 5e6)] == [
        "seconds",
        "minutes",
        "hours",
        "days",
    ]
