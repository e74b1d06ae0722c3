"""Learning rate over a run: linear warm-up, then half a cosine (K3 report §3)."""

import math


def cosine(
    step: int, steps: int, *, peak: float, warmup_fraction: float = 0.01, final_fraction: float = 0
) -> float:
    """Learning rate of the 1-based `step` of `steps`.

    The warm-up lasts ceil(warmup_fraction * steps) steps and ends at `peak`; the last step has
    `final_fraction * peak`.
    """
    warmup = math.ceil(warmup_fraction * steps)
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    floor = final_fraction * peak
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
