"""Prompts that nobody asked for, so that no request waits for a kernel to be compiled or loaded."""

from itertools import count
from typing import TYPE_CHECKING

from openk3.engine.types import Request, SamplingParams

if TYPE_CHECKING:
    from openk3.engine.engine import Engine

TOGETHER = ((1,), (16,), (33, 47), (64, 128, 80), (1024,), (1000, 300, 7))
"""Prompts that come together: one and several, of many sizes."""
APART = (40, 300, 2000)
"""Prompts that come while those before them are answered."""


def run_prompts(engine: "Engine") -> None:
    """Serve TOGETHER, prompts that fill a step, and APART, on an engine that serves nobody."""
    numbers = count()

    def add(length: int) -> None:
        number = next(numbers)  # a token of its own: nothing is found in the cache
        params = SamplingParams(max_tokens=len(APART) + 1, temperature=0, ignore_eos=True)
        length = max(1, min(length, engine.max_context - params.max_tokens))
        ids = (number % engine.runner.vocab_size,) * length
        engine.add(Request(f"warm-up {number}", ids, params))

    full = engine.config.max_batch_tokens
    for lengths in (*TOGETHER, (full,), (full // 2, full // 3, full // 6)):
        for length in lengths:
            add(length)
        while engine.busy:
            engine.step()
    for length in APART:
        add(length)
        engine.step()
    while engine.busy:
        engine.step()
