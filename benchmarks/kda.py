"""KDA kernels against their peers on one GPU: time, ratio, share of the memory roofline, accuracy.

    python benchmarks/kda.py [--peers fla,flash_kda,attn_gym | none]
                             [--only forward,backward,decode,conv] [--case REGEX]

Peers and ours run in one process on the same inputs in an order drawn anew each round; medians of
device-event times with the L2 cache flushed between runs and the host ahead. What was timed is run
again on fresh inputs and some of its heads are compared with float64: `|got - exact| / |exact|` of
every output. Floors are bytes that must move once over the copy rate.
"""

import argparse
import re
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from gpu import Clock, header
from openk3.ops.conv import short_conv
from openk3.ops.kda import BACKENDS, kda
from openk3.ops.kda.decode import Pending, kda_decode

D = 128
RAGGED = [1300, 547, 2048, 963, 271, 3063]
FORWARD = [
    ("T=8192 H=96", 8192, 96, None),
    ("ragged 6 documents H=96", 8192, 96, RAGGED),
    ("8 x 1024 H=96", 8192, 96, [1024] * 8),
    ("T=65536 H=12", 65536, 12, None),
    ("T=131072 H=4", 131072, 4, None),
    ("T=1048576 H=1", 1 << 20, 1, None),
]
BACKWARD = [("T=8192 H=96", 8192, 96, None), ("T=65536 H=12", 65536, 12, None)]


def draw(tokens: int, heads: int, seed: int = 0) -> dict[str, Any]:
    rng = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device="cuda")

    x = {name: normal(1, tokens, heads, D).bfloat16() for name in ("q", "k", "v", "g")}
    x["beta"] = normal(1, tokens, heads).bfloat16()
    return x | {"A_log": normal(heads) * 0.5, "dt_bias": normal(heads * D) * 0.5}


LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Over the heads that `wanted` has."""
    got = got[tuple(slice(n) for n in wanted.shape)].double()
    return float((got - wanted).norm() / wanted.norm())


def some_heads(x: dict[str, Any], num: int) -> dict[str, Any]:
    """The first heads in float64; heads are independent."""
    heads = {n: x[n][:, :, :num].double() for n in ("q", "k", "v", "g", "beta")}
    return heads | {"A_log": x["A_log"][:num].double(), "dt_bias": x["dt_bias"][: num * D].double()}


def errors_of(names: tuple[str, ...], got: Any, wanted: Any) -> str:
    pairs = zip(names, got, wanted, strict=True)
    return "  ".join(f"{n} {relative_error(a, b):.1e}" for n, a, b in pairs)


def offsets(lengths: list[int] | None) -> torch.Tensor | None:
    return None if lengths is None else torch.tensor([0, *accumulate(lengths)], device="cuda")


def starts(peer: str) -> tuple[bool, str]:
    """Whether a peer that is installed also runs: a build for another torch does not."""
    try:
        with torch.no_grad():
            kda(**draw(2048, 96), backend=peer)  # tuned once, for the heads of most cases
    except (RuntimeError, ImportError) as error:
        return False, f"installed, but fails here: {str(error).splitlines()[0]}"
    return True, "runs"


def forward(clock: Clock, names: list[str], rate: float, case: str) -> None:
    print("\nforward, bf16, final state | ms | share of floor | errors against float64")
    for title, tokens, heads, lengths in (c for c in FORWARD if re.search(case, c[0])):
        x, cu = draw(tokens, heads), offsets(lengths)
        fresh = draw(tokens, heads, seed=1)

        def run(name: str, x=x, cu=cu) -> Any:
            return kda(**x, cu_seqlens=cu, output_final_state=True, backend=name)

        with torch.no_grad():
            times = clock.compare({name: partial(run, name) for name in names})
            exact = run("reference", some_heads(fresh, min(heads, 2)))
            errors = {n: errors_of(("o", "state"), run(n, fresh), exact) for n in names}
        report(title, times, errors, tokens * heads * 1282 / rate)


def backward(clock: Clock, names: list[str], rate: float, case: str) -> None:
    print("\nforward + backward | ms | share of floor | extra GiB | errors against float64")
    for title, tokens, heads, lengths in (c for c in BACKWARD if re.search(case, c[0])):
        x, fresh, cu = draw(tokens, heads), draw(tokens, heads, seed=1), offsets(lengths)
        d_o = torch.randn(1, tokens, heads, D, device="cuda").bfloat16()

        def run(name: str, x=x, d_o=d_o, cu=cu) -> Any:
            leaves = {n: x[n].detach().requires_grad_() for n in LEAVES}
            o, _ = kda(**leaves, cu_seqlens=cu, backend=name)
            return torch.autograd.grad(o, list(leaves.values()), d_o.to(o.dtype))

        times = clock.compare({name: partial(run, name) for name in names})
        memory, errors = {}, {}
        exact = run("reference", some_heads(fresh, 1), d_o[:, :, :1])
        for name in names:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            got = run(name, fresh)
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
            errors[name] = errors_of(tuple(f"d{n}" for n in LEAVES), got, exact)
        report(title, times, errors, tokens * heads * (1282 + 2316) / rate, memory)


def report(title: str, times: dict, errors: dict, floor: float, memory: dict | None = None) -> None:
    print(f"{title}  (floor {floor:.3f} ms)", flush=True)
    for name, ms in times.items():
        ratio = "" if name == "triton" else f"  ours is {ms / times['triton']:.2f}x faster"
        extra = "" if memory is None else f"  {memory[name]:.2f} GiB"
        print(f"  {name:10s} {ms:8.3f}  {floor / ms:5.0%}{extra}  {errors[name]}{ratio}")


def decode_peers(names: list[str], x: list[torch.Tensor], fixed: dict[str, Any]) -> dict[str, Any]:
    """One step of the peers' own decoding kernels: norms, gate and recurrence, nothing else of ours
    (no convolution, head norm or output gate)."""
    q, k, v, g, beta, _ = x
    batch, _, heads, _ = q.shape
    A_log, dt_bias = fixed["A_log"], fixed["dt_bias"]
    peers = {}
    if "fla" in names:
        from fla.ops.kda import fused_recurrent_kda

        flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
        args = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
        args |= {"lower_bound": -5.0, "initial_state": fixed["state"], "output_final_state": True}
        peers["fla, recurrence only"] = partial(
            fused_recurrent_kda, **args, **dict.fromkeys(flags, True)
        )
    try:
        from attn_gym.linear.kda import recurrent_kda_decode
    except ImportError:
        return peers
    pool = torch.cat([fixed["state"], fixed["state"][:1]])  # it takes no slot 0
    packed = torch.cat([t.flatten(1) for t in (q, k, v)], -1)
    peers["attn_gym, recurrence only"] = lambda: recurrent_kda_decode(
        packed,
        g.view(1, batch, heads, D),
        beta.view(1, batch, heads),
        A_log,
        dt_bias.view(heads, D),
        pool,
        fixed["slots"] + 1,
    )
    return peers


def decode(clock: Clock, names: list[str], rate: float, heads: int = 96) -> None:
    print(
        "\ndecode, H=96, float32 state; ours: convolution, norms, gate, recurrence, head norm and"
    )
    print("output gate | ms | share of floor | times a step of 1")
    for batch in (1, 64, 256):

        def projections(tokens: int, batch=batch) -> list[torch.Tensor]:
            shape = (batch, tokens, heads, D)
            x = [torch.randn(*shape, device="cuda").bfloat16() for _ in range(5)]
            return [*x[:4], torch.randn(*shape[:3], device="cuda").bfloat16(), x[4]]

        fixed: dict[str, Any] = {
            "conv_weight": torch.randn(3, 4, heads, D, device="cuda"),
            "conv_state": torch.randn(batch, 3, 4, heads, D, device="cuda").bfloat16(),
            "state": torch.randn(batch, heads, D, D, device="cuda"),
            "slots": torch.arange(batch, dtype=torch.int32, device="cuda"),
            "A_log": torch.randn(heads, device="cuda"),
            "dt_bias": torch.randn(heads * D, device="cuda"),
            "norm_weight": torch.ones(D, device="cuda"),
            "lower_bound": -5.0,
            "backend": "triton",
        }
        one, eight = projections(1), projections(8)
        window = Pending(*(t.clone() for t in eight[:5]))
        accepted = torch.full((batch,), 8, dtype=torch.int32, device="cuda")
        replay = {"pending": window, "accepted": accepted}
        runs = {
            "step of 1": partial(kda_decode, *one, **fixed),
            "replay 8, verify 8": partial(kda_decode, *eight, **fixed, **replay),
        }
        times = clock.compare(runs | decode_peers(names, one, fixed))
        # states in and out, six rows, and three convolutions' states: three taps in, four out
        floor = batch * heads * (2 * D * D * 4 + (6 + 3 * 7) * D * 2) / rate
        for name, ms in times.items():
            share = f"{floor / ms:5.0%}  {ms / times['step of 1']:.2f}"
            print(f"  batch {batch:3d} {name:26s} {ms:7.3f}  {share}", flush=True)


def convolution(clock: Clock, rate: float, tokens: int = 8192, dim: int = 96 * D) -> None:
    print("\nshort convolution + SiLU, bf16, T=8192, 12288 channels | ms | share of floor")
    x, d_y = (torch.randn(1, tokens, dim, device="cuda").bfloat16() for _ in range(2))
    x, weight = x.requires_grad_(), torch.randn(dim, 1, 4, device="cuda").requires_grad_()

    def forward(backend: str) -> Any:
        with torch.no_grad():
            return short_conv(x, weight, backend=backend)

    def both(backend: str) -> Any:
        return torch.autograd.grad(short_conv(x, weight, backend=backend)[0], [x, weight], d_y)

    for title, function, passes in (("forward", forward, 2), ("forward + backward", both, 5)):
        times = clock.compare({n: partial(function, n) for n in ("triton", "reference")})
        for name, ms in times.items():
            share = passes * x.numel() * 2 / rate / ms
            print(f"  {title:20s} {name:10s} {ms:7.3f}  {share:5.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", default="fla,flash_kda,attn_gym")
    parser.add_argument("--only", default="forward,backward,decode,conv")
    parser.add_argument("--case", default="", help="only cases whose title matches")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    facts = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "width": D, "value_width": D}
    facts |= {"lower_bound": -5.0, "needs_grad": False, "with_states": False}
    usable = {name: (ok, why) for name, ok, why in BACKENDS.explain(**facts)}
    names = ["triton"]
    for peer in args.peers.split(","):
        ok, why = usable.get(peer, (False, "skipped"))
        if ok:
            ok, why = starts(peer)
        print(f"peer {peer}: {why}")
        names += [peer] if ok else []
    clock = Clock(args.repeats, ahead_ms=8)
    rate, _ = header(clock)
    if "forward" in args.only:
        forward(clock, names, rate, args.case)
    if "backward" in args.only:
        backward(clock, [n for n in names if n != "flash_kda"], rate, args.case)
    if "decode" in args.only:
        decode(clock, names, rate)
    if "conv" in args.only:
        convolution(clock, rate)


if __name__ == "__main__":
    main()
