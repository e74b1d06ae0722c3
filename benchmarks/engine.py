"""The serving engine: on a CPU beside transformers' `kimi_linear`, on a GPU beside our own loop.

    python benchmarks/engine.py cpu [--threads 2] [--venv /tmp/openk3-peer]
    python benchmarks/engine.py gpu [--requests 256]

cpu: the shape of cpu_peer.py, float32. Decoding of one sequence against the peer's `generate`, in
alternating turns; 16 requests at once against one by one; time to the first token of a prompt of
16 pages, cold and cached. gpu: a K3-shaped model of 2 B parameters, random weights in bfloat16; 256
requests of 100 to 1024 tokens each way against a loop of `model.generate`, and the time of a
decoding step at 1K and 64K tokens of context beside the time its weights take to read.
"""

import argparse
import itertools
import os
import random
import statistics
import time
from pathlib import Path

import torch
from cpu_peer import PEER_NEEDS, PROMPT_TOKENS, PeerGenerator, our_config

from openk3.config import LinearAttnConfig, ModelConfig
from openk3.engine import Engine, EngineConfig, Request, SamplingParams
from openk3.model import K3, cast
from openk3.model.init import fill, init_buffers

COPY_BYTES_PER_S = 4.2e12  # what an H200 reads, of 4.8e12


def two_billion() -> ModelConfig:
    return ModelConfig(
        vocab_size=32768,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=16,
        intermediate_size=8192,
        linear_attn=LinearAttnConfig(full_attn_layers=(4, 8, 12, 16), num_heads=16, head_dim=128),
        q_lora_rank=512,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts=48,
        num_experts_per_token=8,
        num_shared_experts=2,
        moe_intermediate_size=768,
        routed_expert_hidden_size=1024,
        attn_res_block_size=4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        media_placeholder_token_id=3,
    )


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(10, 8000) for _ in range(length))


def serve(engine: Engine, requests: list[Request]) -> dict[str, list[float]]:
    """When each request's tokens came, in seconds after all were added."""
    begin = time.perf_counter()
    for request in requests:
        engine.add(request)
    times: dict[str, list[float]] = {request.id: [] for request in requests}
    while engine.busy:
        outputs = engine.step()
        now = time.perf_counter() - begin
        for output in outputs:
            assert output.error is None, output.error
            times[output.request_id] += [now] * len(output.new_ids)
    return times


def on_cpu(venv: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    rng = random.Random(0)
    model = K3(our_config()).eval()
    options = {"hash_block": 128, "num_pages": 600, "max_running": 16}
    print(f"{threads} threads, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")

    peer, few, many = PeerGenerator(venv, threads), 8, 72
    rates: dict[str, list[float]] = {"peer": [], "ours": []}
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{millions:.1f} M parameters, peer ({PEER_NEEDS[1]}) {peer.millions:.1f} M")
    engine = Engine(model, EngineConfig(**options))
    serve(engine, [Request("warm", prompt(rng, PROMPT_TOKENS), greedy(4))])
    for turn in range(3):
        rates["peer"].append((many - few) / (peer.seconds(many) - peer.seconds(few)))
        times = serve(engine, [Request(f"t{turn}", prompt(rng, PROMPT_TOKENS), greedy(many))])[
            f"t{turn}"
        ]
        rates["ours"].append((many - few) / (times[-1] - times[few - 1]))
    peer.stop()
    ours, theirs = (statistics.median(rates[name]) for name in ("ours", "peer"))
    print(
        f"decode, 1 sequence: {ours:.0f} tokens/s, peer {theirs:.0f}: {ours / theirs:.1f}x (3.0x)"
    )

    requests = [Request(f"b{i}", prompt(rng, PROMPT_TOKENS), greedy(48)) for i in range(16)]
    batch = max(t[-1] for t in serve(engine, requests).values())
    alone = sum(
        serve(engine, [Request(f"a{i}", r.prompt_ids, r.params)])[f"a{i}"][-1]
        for i, r in enumerate(requests[:4])
    )
    print(
        f"16 at once: {16 * 48 / batch:.0f} tokens/s, one by one {4 * 48 / alone:.0f}: "
        f"{4 * alone / batch:.1f}x (4.0x)"
    )

    pages = 16 * engine.runner.geometry.page_tokens
    cold, warm = [], []
    for turn in range(3):
        first = prompt(rng, pages)
        cold.append(serve(engine, [Request(f"c{turn}", first, greedy(1))])[f"c{turn}"][0])
        again = first + prompt(rng, 128)
        computed = engine.stats().computed_tokens
        warm.append(serve(engine, [Request(f"w{turn}", again, greedy(1))])[f"w{turn}"][0])
        computed = engine.stats().computed_tokens - computed
    ratio = statistics.median(warm) / statistics.median(cold)
    print(
        f"first token of {pages} tokens: cold {statistics.median(cold):.2f} s, with 128 new ones "
        f"behind a cached prefix {statistics.median(warm):.3f} s ({computed} tokens computed): "
        f"{ratio:.3f} (0.10)"
    )


def on_gpu(num_requests: int, memory_gb: float) -> None:
    device = torch.device("cuda")
    with torch.device(device), torch.no_grad():
        model = K3(two_billion(), seed=None)
        rng = torch.Generator(device).manual_seed(0)
        for name, weight in model.named_parameters():
            fill(name, weight, 0.02, rng)
        init_buffers(model)
    model = cast(model, torch.bfloat16).eval()
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {billions:.2f} B parameters")
    rng = random.Random(0)
    options = {"memory_bytes": int(memory_gb * 1e9), "max_running": 256, "max_batch_tokens": 8192}
    engine = Engine(model, EngineConfig(hash_block=128, **options))
    print(engine.runner.geometry)

    requests = [
        Request(f"r{i}", prompt(rng, rng.randint(100, 1024)), greedy(rng.randint(100, 1024)))
        for i in range(num_requests)
    ]
    serve(engine, [Request(f"w{i}", r.prompt_ids[:50], greedy(8)) for i, r in enumerate(requests)])
    engine.reset()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    times = serve(engine, requests)
    wall = time.perf_counter() - begin
    new = sum(map(len, times.values()))
    first = statistics.median(t[0] for t in times.values())
    per_token = statistics.median((t[-1] - t[0]) / (len(t) - 1) for t in times.values())
    print(
        f"{num_requests} requests: {new / wall:.0f} new tokens/s, TTFT median {first * 1e3:.0f} "
        f"ms, TPOT median {per_token * 1e3:.1f} ms, {engine.stats().steps} steps"
    )

    ids = torch.tensor([requests[0].prompt_ids], device=device)
    model.generate(ids, max_new_tokens=4, temperature=0, stop_ids=[])
    torch.cuda.synchronize()
    begin = time.perf_counter()
    model.generate(ids, max_new_tokens=64, temperature=0, stop_ids=[])
    torch.cuda.synchronize()
    loop = 64 / (time.perf_counter() - begin)
    print(f"our own loop, one by one: {loop:.0f} tokens/s: {new / wall / loop:.1f}x (5x)")

    steps = {}
    for context in (1024, 65536):
        begin = time.perf_counter()
        one = serve(engine, [Request(f"long{context}", prompt(rng, context), greedy(100))])
        own = one[f"long{context}"]
        steps[context] = statistics.median(b - a for a, b in itertools.pairwise(own[10:]))
        print(f"context {context}: first token {own[0]:.2f} s, TPOT {steps[context] * 1e3:.2f} ms")
    print(f"TPOT at 64K over 1K: {steps[65536] / steps[1024]:.2f} (1.3)")
    floor = decode_bytes(model) / COPY_BYTES_PER_S
    print(f"floor of one sequence's step: {floor * 1e3:.2f} ms: its weights, read once")


def decode_bytes(model: K3) -> float:
    """Bytes of the weights that one token reads: all but the experts it is not sent to."""
    config = model.config
    share = config.num_experts_per_token / config.num_experts
    total = 0.0
    for name, weight in model.named_parameters():
        routed = ".experts." in name
        total += weight.numel() * weight.element_size() * (share if routed else 1.0)
    return total - model.embed_tokens.weight.numel() * model.embed_tokens.weight.element_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("where", choices=("cpu", "gpu"))
    parser.add_argument("--venv", type=Path, default=Path("/tmp/openk3-peer"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--memory-gb", type=float, default=60)
    args = parser.parse_args()
    if args.where == "cpu":
        on_cpu(args.venv, args.threads)
    else:
        on_gpu(args.requests, args.memory_gb)


if __name__ == "__main__":
    main()
