"""Training throughput on a CPU beside transformers' `kimi_linear`, the nearest architecture it has.

    python benchmarks/throughput.py [--threads 2] [--steps 5] [--venv /tmp/openk3-peer]

Both train the shape of cpu_peer.py, batch 8 x 256, with AdamW in float32. Turns alternate; the
figure is the median step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from cpu_peer import PEER_NEEDS, VOCAB, our_config, peer_model, peer_python

BATCH, TOKENS = 8, 256


def our_step():
    import torch

    from openk3.model import K3
    from openk3.ops.loss import linear_cross_entropy

    model = K3(our_config()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, VOCAB, (BATCH, TOKENS + 1))

    def step():
        hidden = model.hidden(ids[:, :-1])
        loss = linear_cross_entropy(hidden, model.lm_head.weight, ids[:, 1:]) / (BATCH * TOKENS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.update_balancing()
        return float(loss.detach())

    return step, sum(p.numel() for p in model.parameters())


def peer_step():
    import torch

    model = peer_model(use_cache=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, VOCAB, (BATCH, TOKENS))

    def step():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step, sum(p.numel() for p in model.parameters())


def work(side: str, threads: int, steps: int) -> None:
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step, num_parameters = our_step() if side == "ours" else peer_step()
    step()
    seconds, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": seconds, "loss": losses[-1], "parameters": num_parameters}))


def run_worker(python: Path | str, side: str, threads: int, steps: int) -> dict:
    command = [str(python), __file__, "--worker", side, "--threads", str(threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--steps", str(steps)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"the {side} worker failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--venv", type=Path, default=Path("/tmp/openk3-peer"))
    parser.add_argument("--worker", choices=["ours", "peer"])
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.threads, args.steps)
        return
    pythons = {"ours": sys.executable, "peer": peer_python(args.venv)}
    results: dict[str, list[dict]] = {"ours": [], "peer": []}
    for _ in range(args.turns):
        for side, python in pythons.items():
            results[side].append(run_worker(python, side, args.threads, args.steps))
    speeds = {}
    for side, rows in results.items():
        seconds = statistics.median(s for row in rows for s in row["seconds"])
        speeds[side] = BATCH * TOKENS / seconds
        millions = rows[0]["parameters"] / 1e6
        print(
            f"{side:<5} {millions:6.2f} M parameters  {seconds * 1e3:8.0f} ms a step  "
            f"{speeds[side]:8.0f} tokens/s"
        )
    load = os.getloadavg()[0]
    print(
        f"ratio {speeds['ours'] / speeds['peer']:.2f}  ({args.threads} threads, load {load:.1f}, "
        f"float32, AdamW, peer {PEER_NEEDS[1]}, {time.strftime('%Y-%m-%d')})"
    )


if __name__ == "__main__":
    main()
