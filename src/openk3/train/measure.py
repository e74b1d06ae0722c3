"""How fast this machine trains, by doing a few steps that are thrown away."""

import statistics
import time

from openk3.train.loop import Trainer


def seconds_per_step(trainer: Trainer, *, warmup: int = 2, steps: int = 5) -> float:
    """Median wall time of a step. The trainer is spent by it; no file is written."""
    trainer.prepare()
    times = []
    for _ in range(warmup + steps):
        started = time.perf_counter()
        trainer.take_step()
        times.append(time.perf_counter() - started)
    return statistics.median(times[warmup:])
