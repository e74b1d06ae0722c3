"""Stable LatentMoE's pieces on one GPU at K3's widths, beside torch's `grouped_mm` and Liger.

    python benchmarks/moe.py [--only products,routed,router,decode,loss] [--peers liger]

112 of 896 experts (one of 8 expert-parallel ranks), top-16. Rates count useful FLOP: rows that a
token asked for, not padding. Loads: equal; Zipf (exponent 1); few rows (64 an expert); skewed, the
busiest expert at six times the mean.
"""

import argparse
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional as F

from gpu import Clock, attempt, header, with_grad
from openk3.ops.moe import grouped, row_plan
from openk3.ops.moe.costs import Choice
from openk3.ops.moe.routed import default_choice, routed_experts
from openk3.ops.moe.situ import situ_reference

E, L, INNER, D, TOP_K = 112, 3584, 3072, 7168, 16
T = 8192
EXPONENT = {"zipf": 1.0, "skewed": 0.75}


def routing(load: str, tokens: int = T, seed: int = 0) -> torch.Tensor:
    """ids [T, 16] distinct, of the given distribution of loads."""
    rng = torch.Generator("cuda").manual_seed(seed)
    noise = torch.rand(tokens, E, generator=rng, device="cuda")
    if load == "equal":
        start = torch.arange(tokens, device="cuda")[:, None] * TOP_K
        return (start + torch.arange(TOP_K, device="cuda")) % E
    popularity = torch.arange(1, E + 1, device="cuda") ** -EXPONENT[load]
    gumbel = popularity.log() - (-noise.clamp(1e-20).log()).log()
    return gumbel.topk(TOP_K).indices


def weights(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """w13 [E, 2 F, L] and copies of its halves, w2; pre-activations of a few units."""
    rng = torch.Generator("cuda").manual_seed(seed)
    w13 = torch.empty(E, 2 * INNER, L, device="cuda", dtype=torch.bfloat16)
    w13.normal_(std=2 * L**-0.5, generator=rng)
    w2 = torch.empty(E, L, INNER, device="cuda", dtype=torch.bfloat16)
    w2.normal_(std=INNER**-0.5, generator=rng)
    return w13, w13[:, :INNER].contiguous(), w13[:, INNER:].contiguous(), w2


compiled_situ = torch.compile(lambda g: situ_reference(g[:, :INNER], g[:, INNER:], 4.0, 25.0))


def products(clock: Clock, dense: float) -> None:
    """Each product alone, both implementations, on loads that waste little and much."""
    stacks = weights()
    for load, tokens in (("equal", T), ("zipf", T), ("skewed", T), ("equal", 448), ("zipf", 448)):
        products_of(clock, stacks, load, tokens)


def products_of(clock: Clock, stacks: tuple[torch.Tensor, ...], load: str, tokens: int) -> None:
    w13, w1, w3, w2 = stacks
    ids = routing(load, tokens)
    rows = ids.numel()
    shape = default_choice(ids.device, rows / E, training=True).shape
    exact, plan = row_plan.make_plan(ids, E), row_plan.make_plan(ids, E, align=64, shape=shape)
    peak = int(exact.counts.max()) * E / rows
    waste = float(((exact.counts + 127) // 128 * 128).sum()) / rows - 1
    print(f"{load}, {rows} rows, peak {peak:.1f}x, waste of 128-row tiles {waste:.0%}")
    x = torch.randn(tokens, L, device="cuda").bfloat16()
    d_out = torch.randn(tokens, L, device="cuda").bfloat16()
    xe, xp = (row_plan.gather_rows(x, p)[0] for p in (exact, plan))
    de, dp = (row_plan.gather_rows(d_out, p)[0] for p in (exact, plan))
    ae, ap = (torch.randn(t.shape[0], INNER, device="cuda").bfloat16() for t in (xe, xp))
    be, bp = ae.flip(0), ap.flip(0)
    betas = (4.0, 25.0)
    torch_, ours = grouped.TorchProducts, grouped.TritonProducts
    cases: dict[str, tuple[float, dict[str, Any]]] = {
        "gate-up + SiTU": (4 * L * INNER, {
            "grouped_mm": lambda: compiled_situ(torch_.rows(xe, w13, exact, transposed=True)),
            "ours": lambda: ours.situ(xp, w1, w3, plan, betas, False),
            "ours, kept": lambda: ours.situ(xp, w1, w3, plan, betas, True),
        }),
        "down": (2 * L * INNER, {
            "grouped_mm": lambda: torch_.rows(ae, w2, exact, transposed=True),
            "ours": lambda: ours.rows(ap, w2, plan, transposed=True),
        }),
        "d_act": (2 * L * INNER, {
            "grouped_mm": lambda: torch_.rows(de, w2, exact, transposed=False),
            "ours": lambda: ours.rows(dp, w2, plan, transposed=False),
        }),
        "dx": (4 * L * INNER, {
            "grouped_mm": lambda: torch_.sum_of_rows(ae, w1, be, w3, exact),
            "ours": lambda: ours.sum_of_rows(ap, w1, bp, w3, plan),
        }),
        "d_w2": (2 * L * INNER, {
            "grouped_mm": lambda: torch_.weight_grad(de, ae, exact),
            "ours": lambda: ours.weight_grad(dp, ap, plan),
        }),
    }  # fmt: skip
    for name, (flop, calls) in cases.items():
        times = clock.compare(calls)
        base = times["grouped_mm"]
        cells = [
            f"{who} {ms:.3f} ms {rows * flop / ms / 1e9:.0f} TFLOP/s x{base / ms:.2f}"
            for who, ms in times.items()
        ]
        print(f"  {name:15s} " + " | ".join(cells), flush=True)


def eager(x, p, w13, w2, ids):
    """Plain torch around grouped_mm, SiTU compiled."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    ends = torch.zeros(E, dtype=torch.int32, device="cuda")
    ends.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = ends.cumsum(0).to(torch.int32)
    rows = x[order // TOP_K]
    act = compiled_situ(F.grouped_mm(rows, w13.transpose(1, 2), offs=ends))
    y = F.grouped_mm(act, w2.transpose(1, 2), offs=ends)
    scaled = y * p.flatten()[order, None].to(y.dtype)
    return torch.zeros_like(x).index_add_(0, order // TOP_K, scaled)


def routed(clock: Clock, dense: float, peers: list[str]) -> None:
    """Gather, gate-up, SiTU, down, weighted sum; and all gradients."""
    w13, w1, w3, w2 = weights()
    x = torch.randn(T, L, device="cuda").bfloat16()
    p = torch.rand(T, TOP_K, device="cuda") / 8
    for training in (False, True):
        choice = default_choice(x.device, T * TOP_K / E, training=training)
        print(f"chosen at {T * TOP_K // E} rows an expert, training {training}: {choice}")
    first: dict[str, tuple[float, float]] = {}
    for load in ("equal", "zipf", "skewed"):
        routed_of(clock, dense, peers, load, (x, p, w13, w1, w3, w2), first)


def routed_of(
    clock: Clock, dense: float, peers: list[str], load: str, tensors: tuple[torch.Tensor, ...],
    first: dict[str, tuple[float, float]],
) -> None:  # fmt: skip
    x, p, w13, w1, w3, w2 = tensors
    flop = T * TOP_K * 6 * L * INNER
    ids = routing(load)

    def ours(x, p, w1, w3, w2, ids=ids, **options):
        return routed_experts(x, ids, p, w1, w3, w2, **options)

    calls = {
        "ours": (ours, (x, p, w1, w3, w2)),
        "grouped_mm, eager": (lambda *a, ids=ids: eager(*a, ids), (x, p, w13, w2)),
    }
    calls["ours, grouped_mm"] = (
        lambda *a, f=ours: f(*a, choice=Choice()), (x, p, w1, w3, w2),
    )  # fmt: skip
    if "liger" in peers and load == "equal":
        if find_spec("liger_kernel") is None:
            print("peer liger: not installed")
        else:
            from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

            calls["liger (SwiGLU)"] = (
                lambda x, p, w13, w2, ids=ids: LigerFusedMoEFunction.apply(
                    x, w13, w2, ids.to(torch.int32), p.to(x.dtype)
                ),
                (x, p, w13, w2),
            )
    forward = clock.compare(
        {n: torch.no_grad()(lambda f=f, a=a: f(*a)) for n, (f, a) in calls.items()}
    )
    both = clock.compare({n: with_grad(f, a) for n, (f, a) in calls.items()})
    for name in calls:
        a, b = forward[name], both[name]
        first.setdefault(name, (a, b))
        print(
            f"  {load:7s} {name:20s} forward {a:6.2f} ms {flop / a / 1e9:4.0f} TFLOP/s "
            f"{flop / a / dense:4.0%} | forward+backward {b:6.2f} ms "
            f"{3 * flop / b / 1e9:4.0f} TFLOP/s {3 * flop / b / dense:4.0%} | over equal loads "
            f"{a / first[name][0] - 1:+.1%} {b / first[name][1] - 1:+.1%}",
            flush=True,
        )


def router(clock: Clock) -> None:
    for num in (112, 896):
        router_of(clock, num)


def router_of(clock: Clock, num: int) -> None:
    from openk3.ops.moe.triton_entrance import latent_route_triton
    from openk3.ops.moe.triton_router import choose, router_logits

    x = torch.randn(T, D, device="cuda").bfloat16()
    w = (torch.randn(num, D, device="cuda") * D**-0.5).bfloat16()
    down = (torch.randn(L, D, device="cuda") * D**-0.5).bfloat16()
    bias = torch.zeros(num, device="cuda")
    counts = torch.zeros(num, 1000, dtype=torch.int32, device="cuda")
    logits = torch.randn(T, num, device="cuda")
    calls = {
        "two products": lambda: (router_logits(x, w), x @ down.T),
        "choice": lambda: choose(logits, bias, TOP_K, 1.0),
        "choice, histogram": lambda: choose(logits, bias, TOP_K, 1.0, counts),
        "torch topk": lambda: (logits.sigmoid() + bias).topk(TOP_K + 1),
        "whole": lambda: latent_route_triton(x, w, down, bias, TOP_K, 1.0, counts, None),
    }
    times = clock.compare(calls)
    print(f"{num} experts: " + ", ".join(f"{n} {ms:.3f} ms" for n, ms in times.items()))


def decode(clock: Clock, copy: float) -> None:
    """The packed bytes of the chosen experts over the copy rate are the floor."""
    from openk3.ops.moe.mxfp4 import mxfp4_expert_mlp
    from openk3.ops.moe.mxfp4_layout import pack_experts

    stacks = []
    for n, k in ((INNER, L), (INNER, L), (L, INNER)):
        data = torch.randint(0, 256, (E, n, k // 2), dtype=torch.uint8, device="cuda")
        scale = torch.randint(118, 122, (E, n, k // 32), dtype=torch.uint8, device="cuda")
        stacks.append((data, scale))
    packed = pack_experts(*stacks)
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128):
        x = torch.randn(tokens, L, device="cuda").bfloat16()
        rng = torch.Generator("cuda").manual_seed(tokens)
        ids = torch.rand(tokens, E, generator=rng, device="cuda").topk(TOP_K).indices
        p = torch.full((tokens, TOP_K), 1 / 16, device="cuda")
        used = ids.unique().numel()
        size = used * 3 * L * INNER * (4.25 / 8)
        for activations in ("bf16", "mxfp8"):
            call = graph(partial(mxfp4_expert_mlp, x, ids, p, packed, activations=activations))
            ms = clock.compare({"ours": call})["ours"]
            print(
                f"  {tokens:3d} tokens, {used} experts, {activations}: {ms:.3f} ms, floor "
                f"{size / copy:.3f}, {size / ms / copy:.0%} of copy bandwidth", flush=True,
            )  # fmt: skip


def graph(function):
    """`function` as a CUDA graph, as a decoding engine runs it."""
    function()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        function()
    return captured.replay


def loss(clock: Clock, dense: float) -> None:
    from openk3.ops.loss import linear_cross_entropy

    vocab, tokens = 163840, 8192
    h = torch.randn(tokens, D, device="cuda").bfloat16()
    w = (torch.randn(vocab, D, device="cuda") * D**-0.5).bfloat16()
    t = torch.randint(0, vocab, (tokens,), device="cuda")

    def plain(h, w):
        return F.cross_entropy((h @ w.T).float(), t, reduction="sum")

    calls = {
        "ours": with_grad(lambda h, w: linear_cross_entropy(h, w, t), (h, w)),
        "ours, 2048": with_grad(
            lambda h, w: linear_cross_entropy(h, w, t, chunk_tokens=2048), (h, w)
        ),
        "torch": with_grad(plain, (h, w)),
    }
    times = clock.compare(calls)
    for name, ms in times.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        calls[name]()
        extra = (torch.cuda.max_memory_allocated() - before) / 2**30
        rate = 6 * vocab * tokens * D / ms
        print(f"  loss {name:12s} {ms:.1f} ms {rate / dense:.0%} of dense, {extra:.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="products,routed,router,decode,loss")
    parser.add_argument("--peers", default="")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    clock = Clock(args.repeats)
    copy, dense = header(clock)
    sections = {
        "products": lambda: products(clock, dense),
        "routed": lambda: routed(clock, dense, args.peers.split(",")),
        "router": lambda: router(clock),
        "decode": lambda: decode(clock, copy),
        "loss": lambda: loss(clock, dense),
    }
    for name in args.only.split(","):
        print(f"\n{name}", flush=True)
        attempt(name, sections[name])


if __name__ == "__main__":
    main()
