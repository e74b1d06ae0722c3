"""The guard: what is bad, what is remembered, when it gives up."""

import pytest

from openk3.errors import DivergedError
from openk3.train.guard import WARMUP, Guard


def settled(loss=2.0, **options):
    guard = Guard(spike_nats=1.0, max_bad_steps=3, **options)
    for _ in range(WARMUP):
        assert guard.judge(loss, 1.0) is None
    return guard


@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (float("nan"), 1.0, "loss is nan"),
        (float("inf"), 1.0, "loss is inf"),
        (2.0, float("nan"), "gradient norm is nan"),
        (3.1, 1.0, "loss 3.100 jumped from a mean of 2.000"),
    ],
)
def test_bad_steps_are_told_and_leave_no_trace_in_the_mean(loss, norm, reason):
    guard = settled()
    assert guard.judge(loss, norm) == reason
    assert guard.mean == pytest.approx(2.0)
    assert (guard.num_good, guard.num_bad, guard.bad_in_a_row) == (WARMUP, 1, 1)
    assert guard.judge(2.9, 1.0) is None
    assert guard.bad_in_a_row == 0


def test_early_steps_may_jump_but_must_be_finite():
    guard = Guard(spike_nats=1.0, max_bad_steps=3)
    assert guard.judge(1.0, 1.0) is None
    assert guard.judge(9.0, 1.0) is None
    assert guard.judge(float("nan"), 1.0)


def test_gives_up_after_enough_in_a_row():
    guard = settled()
    for _ in range(2):
        guard.judge(float("nan"), 1.0)
        guard.check()
    guard.judge(2.0, 1.0)
    for _ in range(3):
        guard.check()
        guard.judge(float("nan"), 1.0)
    with pytest.raises(DivergedError, match="3 steps in a row"):
        guard.check()


def test_state_round_trip_is_exact():
    guard = Guard(1.0, 3)
    for loss in (1 / 3, 2 / 7, 1e-9):
        guard.judge(loss, 1.0)
    other = Guard(1.0, 3)
    other.load_state(guard.state())
    assert other.state() == guard.state()
