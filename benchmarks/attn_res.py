"""Block AttnRes on one GPU beside eager torch, torch.compile and flash-linear-attention.

    python benchmarks/attn_res.py [--tokens 8192] [--dim 7168] [--peers fla,compile,eager]

Floors are bytes that must move once over the copy rate; every result is compared with float64.
"""

import argparse
from importlib.util import find_spec

import torch

from gpu import Clock, attempt, header, with_grad
from openk3.ops.attn_res import mix
from openk3.ops.attn_res.reference import mix_reference
from openk3.ops.attn_res.two_phase import block_partials, merge_running, plan_bytes

QUERIES = 24


def contenders(peers: list[str]):
    """name -> function(query, weight, *sources)."""

    def plain(query, weight, *sources):
        return mix_reference(sources, query, weight, 1e-5)[0]

    found = {"ours": lambda q, w, *v: mix(v, q, w, 1e-5, backend="triton")}
    if "fla" in peers:
        if find_spec("fla") is None:
            print("peer fla: flash-linear-attention is not installed")
        else:
            from fla.ops.attnres import fused_attnres

            found["fla"] = lambda q, w, *v: fused_attnres(q, v, w, rms_eps=1e-5)
    if "compile" in peers:
        found["compile"] = torch.compile(plain, dynamic=False)
    if "eager" in peers:
        found["eager"] = plain
    return found


def draw(count, tokens, dim):
    values = [torch.randn(tokens, dim, device="cuda").bfloat16() for _ in range(count)]
    query = (torch.randn(dim, device="cuda") * 3 * dim**-0.5).bfloat16()
    return [query, (1 + 0.1 * torch.randn(dim, device="cuda")).bfloat16(), *values]


def one_phase(clock, copy, sources, tokens, dim, functions):
    inputs = draw(sources, tokens, dim)
    row_set = tokens * dim * 2
    forward, both = {}, {}
    for name, f in functions.items():
        forward[name] = torch.no_grad()(lambda f=f: f(*inputs))
        both[name] = with_grad(f, inputs)
    few = [t.double() if t.ndim == 1 else t[:512].double() for t in inputs]
    exact = mix_reference(few[2:], few[0], few[1], 1e-5)[0]
    floors = (sources + 1) * row_set / copy, (3 * sources + 2) * row_set / copy
    for title, calls, floor in (
        ("forward", forward, floors[0]),
        ("forward+backward", both, floors[1]),
    ):
        times = clock.compare(calls)
        print(f"{sources} sources {title} (floor {floor:.3f} ms)")
        for name, ms in times.items():
            error = float((forward[name]()[:512].double() - exact).norm() / exact.norm())
            print(
                f"  {name:8s} {ms:7.3f} ms  {floor / ms:4.0%} of floor  x{ms / times['ours']:.2f}"
                f"  error {error:.1e}", flush=True,
            )  # fmt: skip


def two_phases(clock, finished, tokens, dim):
    query, weight, *values = draw(finished + 1, tokens, dim)
    queries, weights = query.repeat(QUERIES, 1), weight.repeat(QUERIES, 1)
    blocks, running = values[:-1], values[-1]

    @torch.no_grad()
    def layer_by_layer():
        mix(blocks, query, weight, 1e-5, backend="triton")
        for _ in range(QUERIES - 1):
            mix(values, query, weight, 1e-5, backend="triton")

    def phases():
        partial, lse = block_partials(blocks, queries, weights, backend="triton")
        for q in range(1, QUERIES):
            merge_running(partial[q], lse[q], running, query, weight, backend="triton")

    plan = plan_bytes(finished, QUERIES, tokens, dim)
    times = clock.compare({
        "one": layer_by_layer, "two": phases,
        "first": lambda: block_partials(blocks, queries, weights, backend="triton"),
    })  # fmt: skip
    print(
        f"{finished} finished blocks, {QUERIES} queries: one phase {times['one']:.2f} ms, two "
        f"{times['two']:.2f} ms (first {times['first']:.2f}), x{times['one'] / times['two']:.2f}; "
        f"bytes {plan.one_phase / 1e9:.1f} / {plan.two_phase / 1e9:.1f} GB "
        f"x{plan.one_phase / plan.two_phase:.2f}, planner: "
        f"{'two phases' if plan.two_phase_wins else 'one phase'}", flush=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=7168)
    parser.add_argument("--peers", default="fla,compile,eager")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    clock = Clock(args.repeats)
    copy, _ = header(clock)
    functions = contenders(args.peers.split(","))
    for sources in (2, 5, 9):
        torch._dynamo.reset()
        attempt(
            f"{sources} sources",
            lambda s=sources: one_phase(clock, copy, s, args.tokens, args.dim, functions),
        )
    for finished in (2, 3, 7, 8):
        attempt("two phases", lambda n=finished: two_phases(clock, n, args.tokens, args.dim))


if __name__ == "__main__":
    main()
