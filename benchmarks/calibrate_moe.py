"""Measure the coefficients of `openk3/ops/moe/costs.json` on this GPU, at K3's widths.

    python benchmarks/calibrate_moe.py [--write src/openk3/ops/moe/costs.json]

First the time of a row tile by its height, on experts with so many rows that their weights stay in
the cache; then the routed path, forward and with its backward, by `grouped_mm` and by our products
with tiles of up to two and three heights, for few and many rows an expert. The fastest is chosen.
"""

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

import torch
from moe import INNER, TOP_K, E, L, routing, weights

from gpu import Clock, header, with_grad
from openk3.ops.moe import grouped, row_plan
from openk3.ops.moe.costs import Choice
from openk3.ops.moe.routed import routed_experts

FEW_EXPERTS, UNITS = 8, 96
TOKENS = (448, 1792, 8192)
GROUP = 16


def tile_times(clock: Clock, w2: torch.Tensor) -> dict[int, tuple[float, ...]]:
    """tallest -> time of a tile of 1, 2, ... units over that of the tallest."""
    rows = FEW_EXPERTS * UNITS * row_plan.UNIT
    ids = (torch.arange(rows, device="cuda") % FEW_EXPERTS)[:, None]
    x = torch.randn(rows, INNER, device="cuda").bfloat16()

    def product(height: int, tallest: int):
        # with (1.0,) * height all of these experts' tiles have that height
        plan = row_plan.make_plan(ids, E, align=64, shape=row_plan.Shape((1.0,) * height, GROUP))
        plan = plan._replace(tallest=tallest)
        return lambda: grouped.TritonProducts.rows(x, w2, plan, transposed=True)

    cases = [(height, tallest) for tallest in (2, 3) for height in range(1, tallest + 1)]
    times = clock.compare({case: product(*case) for case in cases})
    found = {}
    for tallest in (2, 3):
        per_tile = [times[h, tallest] * h for h in range(1, tallest + 1)]
        found[tallest] = tuple(round(t / per_tile[-1], 3) for t in per_tile)
        rates = [2 * rows * L * INNER / times[h, tallest] / 1e9 for h in range(1, tallest + 1)]
        print(
            f"tiles of up to {tallest} units: relative times {found[tallest]}, "
            + ", ".join(f"{rate:.0f}" for rate in rates) + " TFLOP/s", flush=True,
        )  # fmt: skip
    return found


def routed_times(clock: Clock, choices: dict[str, Choice], tokens: int, stacks) -> dict[str, Any]:
    """name of choice -> (forward, forward and backward) milliseconds, Zipf loads."""
    w1, w3, w2 = stacks
    ids = routing("zipf", tokens)
    x = torch.randn(tokens, L, device="cuda").bfloat16()
    p = torch.rand(tokens, TOP_K, device="cuda") / 8

    def run(choice: Choice):
        return lambda *a: routed_experts(a[0], ids, a[1], *a[2:], choice=choice)

    inputs = (x, p, w1, w3, w2)
    forward = clock.compare(
        {n: torch.no_grad()(lambda c=c: run(c)(*inputs)) for n, c in choices.items()}
    )
    both = clock.compare({n: with_grad(run(c), inputs) for n, c in choices.items()})
    print(f"{tokens * TOP_K // E} rows an expert: forward {forward}, with backward {both}")
    return {name: (forward[name], both[name]) for name in choices}


def rows_of(times: dict[int, dict[str, Any]], choices: dict[str, Choice], which: int) -> list[dict]:
    """The fastest choice from 0 rows on; another begins midway between two measured points."""
    entry: list[dict] = []
    last = 0
    for tokens, found in times.items():
        rows = tokens * TOP_K // E
        name = min(found, key=lambda n: found[n][which])
        choice = choices[name]
        products = [
            key for key, on in zip(("situ", "rows", "grads"), choice[:3], strict=True) if on
        ]
        row = {"products": products, "heights": choice.shape.heights, "group": choice.shape.group}
        if not entry or {**entry[-1], "from": None} != {**row, "from": None}:
            entry.append({"from": round((last * rows) ** 0.5), **row})
        last = rows
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, help="costs.json to enter the coefficients in")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    clock = Clock(args.repeats)
    header(clock)
    _, w1, w3, w2 = weights()
    choices = {"grouped_mm": Choice()}
    for tallest, heights in tile_times(clock, w2).items():
        shape = row_plan.Shape(heights, GROUP)
        choices[f"ours, up to {tallest}"] = Choice(True, True, True, shape)
    times = {n: routed_times(clock, choices, n, (w1, w3, w2)) for n in TOKENS}
    import triton

    entry = {
        "measured": f"torch {torch.__version__}, triton {triton.__version__}, {date.today()}",
        "training": rows_of(times, choices, 1),
        "inference": rows_of(times, choices, 0),
    }
    text = json.dumps(entry, indent=2)
    print(f'"{torch.cuda.get_device_name()}": {text}')
    if args.write:
        known = json.loads(args.write.read_text(encoding="utf-8")) if args.write.exists() else {}
        known[torch.cuda.get_device_name()] = entry
        args.write.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
