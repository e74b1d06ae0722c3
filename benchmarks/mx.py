"""Speed of the MX quantiser: `python benchmarks/mx.py [--size 4096] [--threads 2]`.

Peers in the same process: a two-pass copy (what memory allows) and, when it is installed, torchao.
"""

import argparse
import platform
import time
from collections.abc import Callable
from datetime import date
from importlib.util import find_spec

import torch

from openk3.ops import mx


def best_of(call: Callable[[], object], repeats: int) -> float:
    """Shortest of `repeats` runs after one warm-up, in seconds."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def torchao_rows(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """torchao's cast to the same formats, if it is there."""
    if find_spec("torchao") is None:
        return {}
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    modes = ScaleCalculationMode
    return {
        "torchao float32 -> mxfp4": lambda: to_mx(x, torch.float4_e2m1fn_x2, 32, modes.EVEN),
        "torchao float32 -> mxfp8": lambda: to_mx(x, torch.float8_e4m3fn, 32, modes.RCEIL),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4096, help="side of the square matrix")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    x = torch.randn(args.size, args.size, generator=torch.Generator().manual_seed(0))
    fp4, fp8 = mx.quantize(x), mx.quantize(x, "mxfp8")
    out32, out16 = torch.empty_like(x), torch.empty_like(x, dtype=torch.bfloat16)
    rows = {
        "copy float32": lambda: out32.copy_(x),
        "quantize float32 -> mxfp4 (even)": lambda: mx.quantize(x),
        "quantize float32 -> mxfp8 (rceil)": lambda: mx.quantize(x, "mxfp8"),
        "dequantize mxfp4 -> float32": lambda: mx.dequantize(*fp4, out=out32),
        "dequantize mxfp4 -> bfloat16": lambda: mx.dequantize(*fp4, out=out16),
        "dequantize mxfp8 -> float32": lambda: mx.dequantize(*fp8, "mxfp8", out=out32),
        "fake_quantize mxfp4": lambda: mx.fake_quantize(x),
        **torchao_rows(x),
    }
    print(f"{args.size} x {args.size}, {args.threads} threads, {platform.processor() or 'cpu'}, "
          f"torch {torch.__version__}, {date.today()}")  # fmt: skip
    print(f"{'':36}{'seconds':>9}{'Melem/s':>10}")
    for name, call in rows.items():
        seconds = best_of(call, args.repeats)
        print(f"{name:36}{seconds:9.4f}{x.numel() / seconds / 1e6:10.0f}")


if __name__ == "__main__":
    main()
