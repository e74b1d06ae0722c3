"""What the GPU benchmarks share: a clock that alternates peers, ceilings of the card, a table."""

import random
import statistics
from collections.abc import Callable, Iterable
from datetime import date
from typing import Any

import torch


class Clock:
    """Medians of device-event times; a 256 MB write before each run empties the L2 cache."""

    def __init__(self, repeats: int = 15, ahead_ms: int = 2) -> None:
        """ahead_ms: how long the device sleeps before each run, for the host to get ahead of it
        as it does in training. It must cover the host's time of the slowest function."""
        self.repeats, self.sleep = repeats, ahead_ms * 2_000_000  # cycles
        self.flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")

    def once(self, function: Callable[[], Any]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        torch.cuda._sleep(self.sleep)
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)

    def compare(self, functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """Median milliseconds of each, in an order drawn anew for each round: a function that
        follows a hot one finds a lower clock, by several percent."""
        order = random.Random(0)
        for function in functions.values():
            function()
            function()
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(self.repeats):
            for name in order.sample(list(functions), len(functions)):
                times[name].append(self.once(functions[name]))
        return {name: statistics.median(t) for name, t in times.items()}

    def copy_rate(self) -> float:
        """Bytes read and written by a device copy, per millisecond."""
        x = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
        y = torch.empty_like(x)
        return 2 * x.numel() / self.compare({"copy": lambda: y.copy_(x)})["copy"]

    def dense_rate(self, size: int = 8192) -> float:
        """FLOP per millisecond of a bf16 product of random square matrices."""
        a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
        return 2 * size**3 / self.compare({"dense": lambda: a @ b})["dense"]


def with_grad(function: Callable[..., torch.Tensor], inputs: Iterable[torch.Tensor]) -> Callable:
    """Forward and backward to every input, with a random output gradient."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.no_grad():
        d_out = torch.randn_like(function(*leaves))

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(function(*leaves), leaves, d_out)

    return run


def header(clock: Clock) -> tuple[float, float]:
    """Print card, versions, date and ceilings; (bytes, FLOP) a millisecond."""
    import triton

    copy, dense = clock.copy_rate(), clock.dense_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"{date.today()}; copy {copy / 1e9:.2f} TB/s, dense 8192^3 {dense / 1e9:.0f} TFLOP/s"
    )
    return copy, dense


def attempt(what: str, section: Callable[[], None]) -> None:
    """Run one section; a failure is printed and the next one goes on."""
    try:
        section()
    except (RuntimeError, ImportError, ValueError, TypeError, AttributeError) as error:
        print(f"{what}: FAILED {type(error).__name__}: {str(error)[:2000]}", flush=True)
    torch.cuda.empty_cache()
