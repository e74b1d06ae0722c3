"""Work that runs beside other work of the same device."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Beside:
    """What the caller joins before it reads a result made on the side."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream

    def join(self, result: Tensor) -> Tensor:
        """Let the current stream wait for the side stream; returns `result`."""
        if self.stream is not None:
            current = torch.cuda.current_stream(result.device)
            current.wait_stream(self.stream)
            result.record_stream(current)
        return result


@contextmanager
def beside(x: Tensor, on: bool) -> Iterator[Beside]:
    """Run the block on a side stream of x's GPU, after everything x waits for; on CPUs in turn.

    Autograd repeats the choice of stream in the backward pass by itself.
    """
    if not (on and x.is_cuda):
        yield Beside(None)
        return
    side = _side(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    x.record_stream(side)
    with torch.cuda.stream(side):
        yield Beside(side)
