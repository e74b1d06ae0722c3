"""Who is said to have stopped a run: the dead, the frozen, the one that hangs, that failed."""

import pytest
import torch.distributed as dist

from openk3.parallel.launcher import START_S
from openk3.parallel.watchdog import Watchdog
from openk3.parallel.world import Pulse


class Run:
    """Watchdogs of several processes in one, with a clock that is moved by hand."""

    def __init__(self, size, seconds):
        self.now, self.alive, self.waiting = 0.0, set(range(size)), set()
        store = dist.HashStore()
        self.pulses = [Pulse() for _ in range(size)]
        self.dogs = [
            Watchdog(
                store,
                r,
                size,
                self.pulses[r],
                seconds,
                clock=lambda: self.now,
                pause=self.rest,
                locate=lambda r=r: (f"file.py:{r} work", r in self.waiting),
            )
            for r in range(size)
        ]

    def rest(self, seconds):
        self.now += seconds

    def step(self, number, phase, *, of=None):
        for rank in of or sorted(self.alive):
            self.pulses[rank].at(phase, number)
            self.dogs[rank].tell()

    def pass_time(self, seconds):
        """Beats of everyone alive; the verdicts of the first beat that has one."""
        end = self.now + seconds
        while self.now < end:
            self.now += self.dogs[0].interval
            verdicts = [v for r in sorted(self.alive) if (v := self.dogs[r].beat())]
            if verdicts:
                return verdicts
        return []


def test_a_run_that_goes_on_is_left_alone():
    run = Run(4, 30)
    for step in range(10):
        run.step(step, "data")
        assert run.pass_time(25) == []


def test_a_dead_process_is_named_within_the_stated_time():
    run = Run(4, 600)
    run.step(7, "forward and backward")
    run.pass_time(5)
    run.alive.remove(2)
    start = run.now
    verdicts = run.pass_time(100)
    assert run.now - start <= 20 + 2 * run.dogs[0].interval
    assert verdicts[0].startswith("rank 2 died or is frozen")
    assert "last in step 7, phase forward and backward" in verdicts[0]
    run.pass_time(run.dogs[0].interval)
    assert {run.dogs[r].beat() for r in run.alive} == {verdicts[0]}  # all say the same


@pytest.mark.parametrize("slow", [0, 3])
def test_the_process_that_hangs_is_named_and_where_the_others_wait(slow):
    run = Run(4, 60)
    run.step(9, "data")
    run.pass_time(5)
    others = [r for r in range(4) if r != slow]
    run.step(9, "forward and backward", of=others)
    run.step(9, "reduce", of=others)
    start = run.now
    verdicts = run.pass_time(200)
    assert 55 <= run.now - start <= 60 + 2 * run.dogs[0].interval
    assert verdicts[0] == (
        f"no progress for 60 s (run.hang_seconds): rank {slow} hangs in step 9, phase data, at "
        f"file.py:{slow} work; rank {others[0]} waits in step 9, phase reduce, at "
        f"file.py:{others[0]} work"
    )


def test_in_one_phase_the_one_that_does_not_wait_for_others_is_named():
    run = Run(4, 30)
    run.step(3, "update")
    run.waiting = {0, 1, 3}
    verdict = run.pass_time(100)[0]
    assert "(run.hang_seconds): rank 2 hangs in step 3, phase update" in verdict
    assert "rank 0 waits" in verdict


def test_when_all_hang_together_all_are_named():
    run = Run(6, 30)
    run.step(3, "update")
    verdict = run.pass_time(100)[0]
    assert [f"rank {r} hangs" in verdict for r in range(6)] == [True] * 4 + [False] * 2
    assert verdict.endswith("and 2 more")


def test_a_failure_elsewhere_explains_the_broken_collective_here():
    run = Run(3, 30)
    run.step(4, "update", of=[1])
    reason = run.dogs[1].fail(ValueError("matrix of NaN"))
    assert run.dogs[0].explain() == reason
    assert reason == "rank 1 failed in step 4, phase update: ValueError: matrix of NaN"


def test_a_death_explains_it_too_and_the_first_to_find_out_is_believed():
    run = Run(3, 600)
    run.step(4, "update")
    run.pass_time(5)
    start = run.now
    reason = run.dogs[0].explain()
    assert reason.startswith("rank 1 died or is frozen")
    assert run.now - start <= 10
    assert run.dogs[2].explain() == reason


def test_a_failure_of_this_process_has_no_other_cause():
    run = Run(2, 30)
    other = run.dogs[1]
    run.rest = lambda seconds, rest=run.rest: (rest(seconds), other.beat())
    run.dogs[0]._pause = run.rest
    assert run.dogs[0].explain() is None


def test_processes_that_left_in_good_order_are_not_missed():
    run = Run(4, 30)
    run.step(9, "checkpoint")
    for rank in (0, 1):
        run.alive.remove(rank)
        run.dogs[rank].tell(left=True)
    run.pass_time(5)
    run.alive.remove(2)  # rank 3's neighbours have left, so it looks after the next
    assert run.pass_time(25)[0].startswith("rank 2 died or is frozen")
    alone = Run(2, 600)
    alone.step(9, "checkpoint")
    alone.alive.remove(1)
    alone.dogs[1].tell(left=True)
    assert alone.pass_time(500) == []
    assert alone.pass_time(200)[0].endswith(
        "(run.hang_seconds): rank 0 hangs in step 9, phase checkpoint, at file.py:0 work"
    )


def test_before_the_first_step_there_is_more_time_and_who_has_not_come_is_named():
    run = Run(3, 30)
    run.alive.remove(1)
    start = run.now
    verdict = run.pass_time(500)[0]
    assert START_S <= run.now - start <= START_S + 2 * run.dogs[0].interval
    assert verdict == (
        "no progress for 120 s: rank 1 has not begun; rank 0 waits in step 0, phase start, at "
        "file.py:0 work"
    )
