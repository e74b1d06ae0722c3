"""KDA kernels against their peers on one GPU: time, ratio, share of the memory roofline, accuracy.

    python benchmarks/kda.py [--peers fla,flash_kda,attn_gym | none]
                             [--only forward,backward,decode,conv] [--case SUBSTRING]

Peers and ours run in one process on the same inputs in alternating order; medians of device-event
times with the L2 cache flushed between runs. What was timed is run again on fresh inputs and some
of its heads are compared with float64. Floors are bytes that must move once over the copy rate.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch

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


class Clock:
    """Medians of device-event times. Before each run 256 MB are written twelve times: the L2 cache
    is emptied, and the host gets so far ahead that the device need not wait for it."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")

    def once(self, function: Callable[[], Any]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(12):
            self.flush.zero_()
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)

    def compare(self, functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """Median milliseconds of each, run in turn."""
        for function in functions.values():
            function()
            function()
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(self.repeats):
            for name, function in functions.items():
                times[name].append(self.once(function))
        return {name: statistics.median(t) for name, t in times.items()}

    def copy_rate(self) -> float:
        """Bytes read and written by a device copy, per millisecond."""
        x = torch.empty(1 << 31, dtype=torch.int8, device="cuda")
        y = torch.empty_like(x)
        return 2 * x.numel() / self.compare({"copy": lambda: y.copy_(x)})["copy"]


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def some_heads(x: dict[str, Any], num: int) -> dict[str, Any]:
    """The first heads in float64; heads are independent."""
    heads = {n: t[:, :, :num].double() for n, t in x.items() if n in ("q", "k", "v", "g", "beta")}
    return heads | {"A_log": x["A_log"][:num].double(), "dt_bias": x["dt_bias"][: num * D].double()}


def offsets(lengths: list[int] | None) -> torch.Tensor | None:
    return None if lengths is None else torch.tensor([0, *accumulate(lengths)], device="cuda")


def starts(peer: str) -> tuple[bool, str]:
    """Whether a peer that is installed also runs: a build for another torch does not."""
    try:
        with torch.no_grad():
            kda(**draw(64, 1), backend=peer)
    except (RuntimeError, ImportError) as error:
        return False, f"installed, but fails here: {str(error).splitlines()[0]}"
    return True, "runs"


def forward(clock: Clock, names: list[str], rate: float, case: str) -> None:
    print("\nforward, bf16, final state | ms | share of floor | error of o against float64")
    for title, tokens, heads, lengths in (c for c in FORWARD if case in c[0]):
        x, cu = draw(tokens, heads), offsets(lengths)
        fresh = draw(tokens, heads, seed=1)
        with torch.no_grad():

            def run(name: str, x=x, cu=cu) -> Any:
                return kda(**x, cu_seqlens=cu, output_final_state=True, backend=name)

            times = clock.compare({name: partial(run, name) for name in names})
            num = min(heads, 2)
            exact, _ = kda(**some_heads(fresh, num), cu_seqlens=cu, backend="reference")
            errors = {
                name: relative_error(
                    kda(**fresh, cu_seqlens=cu, backend=name)[0][:, :, :num], exact
                )
                for name in names
            }
        floor = tokens * heads * 1282 / rate
        report(title, times, errors, floor)


def backward(clock: Clock, names: list[str], rate: float, case: str) -> None:
    print("\nforward + backward | ms | share of floor | error of dk against float64 | extra GiB")
    for title, tokens, heads, lengths in (c for c in BACKWARD if case in c[0]):
        x, fresh, cu = draw(tokens, heads), draw(tokens, heads, seed=1), offsets(lengths)
        leaves = {n: t.requires_grad_() for n, t in x.items()}
        d_o = torch.randn(1, tokens, heads, D, device="cuda").bfloat16()

        def run(name: str, leaves=leaves, d_o=d_o, cu=cu) -> Any:
            o, _ = kda(**leaves, cu_seqlens=cu, backend=name)
            return torch.autograd.grad(o, list(leaves.values()), d_o.to(o.dtype))

        times = clock.compare({name: partial(run, name) for name in names})
        memory, errors = {}, {}
        few = {n: t.requires_grad_() for n, t in some_heads(fresh, 1).items()}
        exact = run("reference", few, d_o[:, :, :1])[1]
        fresh = {n: t.requires_grad_() for n, t in fresh.items()}
        for name in names:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(name)
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
            errors[name] = relative_error(run(name, fresh)[1][:, :, :1], exact)
        report(title, times, errors, tokens * heads * (1282 + 2316) / rate, memory)


def report(title: str, times: dict, errors: dict, floor: float, memory: dict | None = None) -> None:
    print(f"{title}  (floor {floor:.3f} ms)")
    for name, ms in times.items():
        ratio = "" if name == "triton" else f"  ours is {ms / times['triton']:.2f}x faster"
        extra = "" if memory is None else f"  {memory[name]:.2f} GiB"
        print(f"  {name:10s} {ms:8.3f}  {floor / ms:5.0%}  {errors[name]:.1e}{extra}{ratio}")


def decode(clock: Clock, rate: float, heads: int = 96) -> None:
    print(
        "\ndecode, H=96, float32 state, convolution, norms and gates included | ms | share of floor"
    )
    for batch in (1, 64, 256):

        def projections(tokens: int, batch=batch) -> list[torch.Tensor]:
            shape = (batch, tokens, heads, D)
            x = [torch.randn(*shape, device="cuda").bfloat16() for _ in range(5)]
            return [*x[:4], torch.randn(*shape[:3], device="cuda").bfloat16(), x[4]]

        fixed = {
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
        times = clock.compare(
            {
                "step of 1": lambda one=one, fixed=fixed: kda_decode(*one, **fixed),
                "replay 8, verify 8": lambda e=eight, f=fixed, w=window, a=accepted: kda_decode(
                    *e, **f, pending=w, accepted=a
                ),
            }
        )
        floor = batch * heads * (2 * D * D * 4 + 6 * D * 2) / rate
        for name, ms in times.items():
            print(f"  batch {batch:3d} {name:20s} {ms:7.3f}  {floor / ms:5.0%}")


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
    parser.add_argument("--case", default="", help="only cases whose title contains this")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, command: {parser.prog}")
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
    clock = Clock(args.repeats)
    rate = clock.copy_rate()
    print(f"device copy {rate / 1e9:.2f} TB/s")
    if "forward" in args.only:
        forward(clock, names, rate, args.case)
    if "backward" in args.only:
        backward(clock, [n for n in names if n != "flash_kda"], rate, args.case)
    if "decode" in args.only:
        decode(clock, rate)
    if "conv" in args.only:
        convolution(clock, rate)


if __name__ == "__main__":
    main()
