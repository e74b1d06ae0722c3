"""The serving engine: on a CPU beside transformers' `kimi_linear`, on a GPU beside our own loop.

    python benchmarks/engine.py cpu [--threads 2] [--venv /tmp/openk3-peer]
    python benchmarks/engine.py gpu [--requests 256] [--sections throughput,loop] [--tiny]

cpu: the shape of cpu_peer.py, float32. Decoding of one sequence against the peer's `generate`, in
alternating turns; 16 requests at once against one by one; time to the first token of a prompt of
16 pages, cold and cached. gpu: a K3-shaped model of 2 B parameters, random weights in bfloat16; 256
requests of 100 to 1024 tokens each way against a loop of `model.generate`, the time of a decoding
step at 1K and 64K tokens of context, both beside the time that the bytes take which cannot but be
moved, and overlap of scheduling on and off. Kernels are compiled by several processes first; --tiny
runs the same code with a small model, also without a GPU.
"""

import argparse
import gc
import itertools
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from cpu_peer import PEER_NEEDS, PROMPT_TOKENS, PeerGenerator, our_config

from gpu import attempt
from openk3.config import LinearAttnConfig, ModelConfig
from openk3.engine import Engine, EngineConfig, Request, SamplingParams
from openk3.model import K3, cast
from openk3.model.init import fill, init_buffers
from openk3.ops.native import BACKENDS

COPY_BYTES_PER_S = 4.2e12  # what an H200 reads, of 4.8e12
STARTED = time.perf_counter()


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


def tiny() -> ModelConfig:
    """The same layers in small, to try the script where there is no GPU."""
    small = LinearAttnConfig(full_attn_layers=(4, 8), num_heads=2, head_dim=32)
    return replace(two_billion(), hidden_size=128, num_hidden_layers=8, num_attention_heads=2,
                   intermediate_size=256, linear_attn=small, q_lora_rank=64, kv_lora_rank=32,
                   qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, num_experts=4,
                   num_experts_per_token=2, moe_intermediate_size=64,
                   routed_expert_hidden_size=64)  # fmt: skip


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(10, 8000) for _ in range(length))


def serve(
    engine: Engine, requests: list[Request], limit_s: float = float("inf")
) -> dict[str, list[float]]:
    """When each request's tokens came, in seconds after all were added; what has not ended after
    limit_s seconds is aborted."""
    begin = time.perf_counter()
    for request in requests:
        engine.add(request)
    times: dict[str, list[float]] = {request.id: [] for request in requests}
    while engine.busy:
        outputs = engine.step()
        now = time.perf_counter() - begin
        if now > limit_s:
            print(f"not ended after {limit_s:g} s: aborted", flush=True)
            limit_s = float("inf")
            for request in requests:
                engine.abort(request.id)
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
    print("cpu_step:", *BACKENDS.explain(device=torch.device("cpu"), dtype=torch.float32)[0])

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

    together, single = [], []
    for turn in range(3):
        requests = [
            Request(f"b{turn}.{i}", prompt(rng, PROMPT_TOKENS), greedy(48)) for i in range(16)
        ]
        together.append(16 * 48 / max(t[-1] for t in serve(engine, requests).values()))
        alone = [Request(f"a{r.id}", r.prompt_ids, r.params) for r in requests[:4]]
        single.append(4 * 48 / sum(serve(engine, [r])[r.id][-1] for r in alone))
    ratio = statistics.median(x / y for x, y in zip(together, single, strict=True))
    print(
        f"16 at once: {statistics.median(together):.0f} tokens/s, one by one "
        f"{statistics.median(single):.0f}: {ratio:.1f}x (4.0x)"
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


class Bench:
    """The sections on a GPU; `tiny` runs the same code with a small model on any device."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.tiny, self.num_requests = args.tiny, args.requests
        self.scale = 16 if self.tiny else 1
        self.limit_s = args.limit_s
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = random_model(tiny() if self.tiny else two_billion(), self.device)
        self.options = {
            "hash_block": 128 // self.scale,
            "memory_bytes": int(args.memory_gb * 1e9 / self.scale**2),
            "max_running": 256,
            "max_batch_tokens": 8192 // self.scale,
        }
        self.rate = 0.0
        """Of `throughput`, for the sections behind it."""

    def engine(self, **options) -> Engine:
        gc.collect()  # the one before, with its pool
        return Engine(self.model, EngineConfig(**{**self.options, **options}))

    def lengths(self, rng: random.Random) -> int:
        return rng.randint(100 // self.scale, 1024 // self.scale)

    def requests(self, number: int) -> list[Request]:
        rng = random.Random(0)
        return [
            Request(f"r{i}", prompt(rng, self.lengths(rng)), greedy(self.lengths(rng)))
            for i in range(number)
        ]

    def warm(self, part: str) -> None:
        """Compile what a section needs; several processes at once fill Triton's cache on disk."""
        if part == "loop":
            self.model.generate(ids_of(prompt(random.Random(1), 300), self.device),
                                max_new_tokens=3, temperature=0, stop_ids=[])  # fmt: skip
            return
        engine = self.engine(memory_bytes=int(4e9 / self.scale**2), overlap=False)
        sizes = {"decode": (20, 1, 6), "prefill": (1, 3000, 1), "many": (200, 40, 3)}
        number, length, new = sizes[part]
        length = max(2, length // self.scale)
        rng = random.Random(2)
        requests = [Request(f"w{i}", prompt(rng, length), greedy(new)) for i in range(number)]
        serve(engine, requests)

    def throughput(self) -> None:
        engine, requests = self.engine(), self.requests(self.num_requests)
        say(engine.runner.geometry)
        begin = time.perf_counter()
        engine.warm_up()
        serve(engine, [Request("w", requests[0].prompt_ids, greedy(4))])
        engine.reset()
        say(f"warm-up {time.perf_counter() - begin:.1f} s")
        begin, before = time.perf_counter(), engine.stats().steps
        times = serve(engine, requests, self.limit_s)
        wall = time.perf_counter() - begin
        new, steps = sum(map(len, times.values())), engine.stats().steps - before
        self.rate = new / wall
        done = [t for t in times.values() if len(t) > 1]
        first = statistics.median(t[0] for t in done)
        per_token = statistics.median((t[-1] - t[0]) / (len(t) - 1) for t in done)
        rows = new / steps
        context = statistics.mean(len(r.prompt_ids) + r.params.max_tokens / 2 for r in requests)
        floor = decode_bytes(self.model, rows, context) / COPY_BYTES_PER_S
        say(
            f"{self.num_requests} requests: {self.rate:.0f} new tokens/s ({new} in {wall:.1f} s), "
            f"TTFT median {first * 1e3:.0f} ms, TPOT median {per_token * 1e3:.2f} ms; {steps} "
            f"steps of {wall / steps * 1e3:.2f} ms and {rows:.0f} rows; floor of such a decoding "
            f"step {floor * 1e3:.2f} ms: weights, states, latents"
        )

    def loop(self) -> None:
        """`model.generate` of one request at a time: a sample of one, 64 tokens."""
        ids = ids_of(self.requests(1)[0].prompt_ids, self.device)
        many = 64 // self.scale + 4
        self.model.generate(ids, max_new_tokens=4, temperature=0, stop_ids=[])
        synchronize()
        begin = time.perf_counter()
        self.model.generate(ids, max_new_tokens=many, temperature=0, stop_ids=[])
        synchronize()
        loop = many / (time.perf_counter() - begin)
        say(f"our own loop, one by one ({many} tokens of one request): {loop:.0f} tokens/s: "
            f"{self.rate / loop:.1f}x (5x)")  # fmt: skip

    def contexts(self) -> None:
        rng, steps, engine = random.Random(3), {}, self.engine()
        for context in (1024 // self.scale, 65536 // self.scale):
            new = 100 // min(self.scale, 4)
            own = serve(engine, [Request(f"c{context}", prompt(rng, context), greedy(new))],
                        self.limit_s)[f"c{context}"]  # fmt: skip
            steps[context] = statistics.median(b - a for a, b in itertools.pairwise(own[10:]))
            floor = decode_bytes(self.model, 1, context) / COPY_BYTES_PER_S
            say(f"context {context}: first token {own[0]:.2f} s, TPOT {steps[context] * 1e3:.2f} "
                f"ms, floor {floor * 1e3:.2f}")  # fmt: skip
        short, long = steps.values()
        say(f"TPOT at 64K over 1K: {long / short:.2f} (1.3)")

    def in_turn(self) -> None:
        """The first section without overlap, over a quarter of its requests, and with it."""
        rates = []
        for overlap in (False, True):
            engine, requests = self.engine(overlap=overlap), self.requests(self.num_requests // 4)
            engine.warm_up()
            begin = time.perf_counter()
            times = serve(engine, requests, self.limit_s)
            rates.append(sum(map(len, times.values())) / (time.perf_counter() - begin))
            del engine
        say(f"{len(requests)} requests without and with overlap: {rates[0]:.0f} and "
            f"{rates[1]:.0f} tokens/s: {rates[1] / rates[0]:.2f}x")  # fmt: skip


WARM = ("decode", "many", "prefill", "loop")
SECTIONS = ("throughput", "loop", "contexts", "in_turn")


def say(what: object) -> None:
    print(f"[{time.perf_counter() - STARTED:5.1f} s] {what}", flush=True)


def ids_of(ids: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([ids], device=device)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def random_model(config: ModelConfig, device: torch.device) -> K3:
    with torch.device(device), torch.no_grad():
        model = K3(config, seed=None)
        rng = torch.Generator(device).manual_seed(0)
        for name, weight in model.named_parameters():
            fill(name, weight, 0.02, rng)
        init_buffers(model)
    return cast(model, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()


def on_gpu(args: argparse.Namespace) -> None:
    if args.warm:
        Bench(args).warm(args.warm)
        return
    again = [sys.executable, *sys.argv]
    if not args.no_parallel_warm_up:
        children = {part: subprocess.Popen([*again, "--warm", part]) for part in WARM}
        for part, child in children.items():
            say(f"kernels of {part}: exit status {child.wait()}")
    bench = Bench(args)
    billions = sum(p.numel() for p in bench.model.parameters()) / 1e9
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu"
    say(f"{name}, torch {torch.__version__}, {date.today()}, {billions:.2f} B parameters")
    for section in args.sections.split(","):
        attempt(section, getattr(bench, section))


def decode_bytes(model: K3, rows: float, context: float) -> float:
    """Bytes that one step of `rows` sequences of `context` tokens cannot but move: each weight
    once (of the experts those that some token is sent to), states twice, latents once."""
    config, size = model.config, model.lm_head.weight.element_size()
    share = 1 - (1 - config.num_experts_per_token / config.num_experts) ** rows
    total = 0.0
    for name, weight in model.named_parameters():
        routed = ".experts." in name
        total += weight.numel() * weight.element_size() * (share if routed else 1.0)
    total -= model.embed_tokens.weight.numel() * size
    attn, layers = config.linear_attn, config.num_hidden_layers
    num_kda = sum(config.is_kda(i) for i in range(layers))
    state = 4 * attn.num_heads * attn.head_dim**2
    latent = size * (config.kv_lora_rank + config.qk_rope_head_dim)
    return total + rows * (2 * num_kda * state + (layers - num_kda) * context * latent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("where", choices=("cpu", "gpu"))
    parser.add_argument("--venv", type=Path, default=Path("/tmp/openk3-peer"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--memory-gb", type=float, default=50)
    parser.add_argument("--tiny", action="store_true", help="a small model, on any device")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--limit-s", type=float, default=45, help="of each load")
    parser.add_argument("--no-parallel-warm-up", action="store_true")
    parser.add_argument("--warm", choices=WARM, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.where == "cpu":
        on_cpu(args.venv, args.threads)
    else:
        on_gpu(args)


if __name__ == "__main__":
    main()
