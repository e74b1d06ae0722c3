"""Training throughput on a CPU beside transformers' `kimi_linear`, the nearest architecture it has.

    python benchmarks/throughput.py [--threads 2] [--steps 5] [--venv /tmp/openk3-peer]

Both train the same shape (hidden 256, 8 layers of which 6 KDA and 2 MLA, 4 heads of 64, 8 experts
of 256, top-2, vocabulary 8192, batch 8 x 256) with AdamW in float32. The peer runs in a virtual
environment of its own, made on first use. Turns alternate; the figure is the median step. Ours
computes more per layer: AttnRes mixes, a full-rank output gate on MLA, a latent projection around
the experts, Quantile Balancing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

BATCH, TOKENS, VOCAB = 8, 256, 8192
PEER_NEEDS = ["torch==2.13.0", "transformers==5.24.0"]


def our_step():
    import torch

    from openk3.config import LinearAttnConfig, ModelConfig
    from openk3.model import K3
    from openk3.ops.loss import linear_cross_entropy

    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=1024,
        linear_attn=LinearAttnConfig(full_attn_layers=(4, 8), num_heads=4, head_dim=64),
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=256,
        routed_expert_hidden_size=256,
        attn_res_block_size=4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        media_placeholder_token_id=3,
    )
    model = K3(config).train()
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
    from transformers import AutoModelForCausalLM
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

    layers = ["linear_attention"] * 8
    layers[3] = layers[7] = "full_attention"
    config = KimiLinearConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        kv_lora_rank=128,
        q_lora_rank=128,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
        num_experts_per_tok=2,
        num_local_experts=8,
        linear_head_dim=64,
        linear_num_heads=4,
        layer_types=layers,
        mlp_layer_types=["dense"] + ["sparse"] * 7,
        max_position_embeddings=4096,
        pad_token_id=2,
        bos_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
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


def peer_python(folder: Path) -> Path:
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PEER_NEEDS], check=True)
        (folder / ".ready").touch()
    return python


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
