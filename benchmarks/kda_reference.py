"""The chunkwise KDA reference beside the token-by-token recurrence, forward and backward on a CPU.

    python benchmarks/kda_reference.py [--threads 2]

T = 512, H = 8, D = 64, float32; medians. Both are the code of `openk3.ops.kda.reference`, and their
outputs are compared before anything is timed.
"""

import argparse
import os
import statistics
import time

import torch

from openk3.ops.kda import reference

TOKENS, HEADS, WIDTH = 512, 8, 64


def draw() -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = [(1, TOKENS, HEADS, WIDTH)] * 4 + [(1, TOKENS, HEADS), (HEADS,), (HEADS * WIDTH,)]
    return [torch.randn(shape, generator=rng).requires_grad_() for shape in shapes]


def run(form, inputs: list[torch.Tensor]) -> torch.Tensor:
    active = reference.activate(*inputs, -5.0, WIDTH**-0.5)
    o, _, _ = form(*active, torch.zeros(1, HEADS, WIDTH, WIDTH), [TOKENS])
    return o.view(1, TOKENS, HEADS, WIDTH)


def median_ms(form, inputs: list[torch.Tensor], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run(form, inputs).sum().backward()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    inputs = draw()
    gap = (run(reference.chunkwise, inputs) - run(reference.recurrent, inputs)).abs().max()
    chunkwise = median_ms(reference.chunkwise, inputs, 9)
    recurrent = median_ms(reference.recurrent, inputs, 3)
    print(f"largest difference of the outputs {gap:.1e}")
    print(
        f"chunkwise {chunkwise:.1f} ms, recurrence {recurrent:.1f} ms: {recurrent / chunkwise:.1f}x"
    )
    print(
        f"T={TOKENS} H={HEADS} D={WIDTH} float32, {threads} threads, load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
