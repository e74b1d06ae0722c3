"""The serving engine: on a CPU beside transformers' `kimi_linear`, on a GPU beside our own loop.

    python benchmarks/engine.py cpu [--venv /tmp/openk3-peer]
    python benchmarks/engine.py gpu [--requests 256]

cpu: hidden 256, 8 layers (6 KDA, 2 MLA), 8 experts top-2, vocabulary 8192, float32, 2 threads.
Decoding of one sequence against the peer's `generate` of a model of the same sizes, in alternating
turns; 16 requests at once against one by one; time to the first token of a prompt of 16 pages, cold
and cached. gpu: a K3-shaped model of 2 B parameters, random weights in bfloat16; 256 requests of
100 to 1024 tokens each way against a loop of `model.generate`, and the time of a decoding step at
1K and 64K tokens of context beside the time its weights take to read.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import time

import torch

from openk3.config import LinearAttnConfig, ModelConfig
from openk3.engine import Engine, EngineConfig, Request, SamplingParams
from openk3.model import K3, cast
from openk3.model.init import fill, init_buffers

PEER_NEEDS = ["torch==2.13.0", "transformers==5.24.0"]
COPY_BYTES_PER_S = 4.2e12  # what an H200 reads, of 4.8e12


def small_config() -> ModelConfig:
    return ModelConfig(
        vocab_size=8192,
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


PEER = """
import json, sys, time, torch
from transformers.models.kimi_linear import KimiLinearConfig, KimiLinearForCausalLM
torch.set_num_threads(2)
config = KimiLinearConfig(
    vocab_size=8192, hidden_size=256, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=4, head_dim=64, intermediate_size=1024, moe_intermediate_size=256,
    num_experts=8, num_experts_per_token=2, num_shared_experts=1, kv_lora_rank=128,
    qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, first_k_dense_replace=1,
    bos_token_id=0, eos_token_id=1, pad_token_id=2,
    linear_attn_config=dict(full_attn_layers=[4, 8], kda_layers=[1, 2, 3, 5, 6, 7], num_heads=4,
                            head_dim=64, short_conv_kernel_size=4))
model = KimiLinearForCausalLM(config).eval().float()
ids = torch.randint(10, 8000, (1, 16))
options = dict(do_sample=False, eos_token_id=None, pad_token_id=2)
model.generate(ids, max_new_tokens=4, **options)
print("ready", flush=True)
for line in sys.stdin:
    begin = time.perf_counter()
    model.generate(ids, max_new_tokens=int(line), **options)
    print(json.dumps(time.perf_counter() - begin), flush=True)
"""


class Peer:
    """transformers' model in a process and a virtual environment of its own."""

    def __init__(self, venv: str) -> None:
        python = os.path.join(venv, "bin", "python")
        if not os.path.exists(python):
            subprocess.run(["python3", "-m", "venv", venv], check=True)
            subprocess.run([python, "-m", "pip", "install", "-q", *PEER_NEEDS], check=True)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([python, "-c", PEER], **pipes)
        if self._line() != "ready":
            raise RuntimeError("the peer did not start; its message is above")

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def generate(self, tokens: int) -> float:
        """Seconds for a prompt of 16 and that many new tokens."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{tokens}\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def on_cpu(venv: str) -> None:
    torch.set_num_threads(2)
    rng = random.Random(0)
    model = K3(small_config()).eval()
    options = {"hash_block": 128, "num_pages": 600, "max_running": 16}
    print(f"2 threads, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")

    peer, few, many, rates = Peer(venv), 8, 72, {"peer": [], "ours": []}
    engine = Engine(model, EngineConfig(**options))
    serve(engine, [Request("warm", prompt(rng, 16), greedy(4))])
    for turn in range(3):
        rates["peer"].append((many - few) / (peer.generate(many) - peer.generate(few)))
        times = serve(engine, [Request(f"t{turn}", prompt(rng, 16), greedy(many))])[f"t{turn}"]
        rates["ours"].append((many - few) / (times[-1] - times[few - 1]))
    peer.stop()
    ours, theirs = (statistics.median(rates[name]) for name in ("ours", "peer"))
    print(
        f"decode, 1 sequence: {ours:.0f} tokens/s, peer {theirs:.0f}: {ours / theirs:.1f}x (3.0x)"
    )

    requests = [Request(f"b{i}", prompt(rng, 16), greedy(48)) for i in range(16)]
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
    parser.add_argument("--venv", default="/tmp/openk3-peer")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--memory-gb", type=float, default=60)
    args = parser.parse_args()
    if args.where == "cpu":
        on_cpu(args.venv)
    else:
        on_gpu(args.requests, args.memory_gb)


if __name__ == "__main__":
    main()
