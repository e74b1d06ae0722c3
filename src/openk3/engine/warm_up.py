"""Prompts that nobody asked for, so that no request waits for a kernel to be compiled."""

from itertools import count
from typing import TYPE_CHECKING

from openk3.engine.types import Request, SamplingParams

if TYPE_CHECKING:
    from openk3.engine.engine import Engine

LENGTHS = ((1,), (16,), (33, 47), (64, 128, 80), (1024,), (1000, 300, 7))
"""Prompts that come together: one and several, multiples of what kernels like, and others."""


def run_prompts(engine: "Engine") -> None:
    """Serve LENGTHS on an engine that serves nobody."""
    numbers = count()
    for lengths in LENGTHS:
        for length in (max(1, min(n, engine.max_context - 3)) for n in lengths):
            number = next(numbers)  # a token of its own: nothing is found in the cache
            params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
            ids = (number % engine.runner.vocab_size,) * length
            engine.add(Request(f"warm-up {number}", ids, params))
        while engine.busy:
            engine.step()
