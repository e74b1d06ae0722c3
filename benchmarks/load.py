"""Speed and memory of openk3.load: `python benchmarks/load.py [--gb 1] [--folder DIR]`.

The peer, in the same process and on the same warm files, is two threads that read the files into
fresh memory. Each way to load is measured in a process of its own for memory: the peak of anonymous
memory above what the process had before, over the bytes of the finished model. "floor" is what any
conversion must do on this machine: two threads read the files through a buffer that stays in cache,
and fill as many bytes of fresh memory (huge pages) as the load took.
"""

import argparse
import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import numpy as np
import torch

import openk3
from openk3.checkpoint.hf.read import allocate_lasting
from openk3.config import ModelConfig, preset
from openk3.model import K3, cast

CHUNK = 8 << 20
WAYS: dict[str, dict] = {
    "bf16 files, dtype=None (mapped)": {"files": "dense"},
    "bf16 files, dtype=float32": {"files": "dense", "dtype": torch.float32},
    "mxfp4 files, experts='packed' (mapped)": {"files": "mxfp4", "experts": "packed"},
    "mxfp4 files cut per expert, experts='packed'": {"files": "scattered", "experts": "packed"},
    "mxfp4 files, dequantised to bf16": {"files": "mxfp4"},
    "mxfp4 files, dequantised to float32": {"files": "mxfp4", "dtype": torch.float32},
}


def config(gigabytes: float) -> ModelConfig:
    """A model of K3's proportions with about so many 10^9 bytes of bfloat16 weights."""
    experts = max(16, round(gigabytes * 128))
    return preset("mini", num_hidden_layers=5, num_experts=experts,
                  linear_attn=preset("nano").linear_attn.__class__(
                      full_attn_layers=(4, 5), num_heads=14, head_dim=128))  # fmt: skip


def write_files(folder: Path, gigabytes: float) -> None:
    """The same random weights in bf16, in MXFP4, and in MXFP4 in the order of tensor names."""
    model = cast(K3(config(gigabytes), seed=0), torch.bfloat16)
    openk3.save(model, folder / "dense", max_shard_bytes=1e12)
    openk3.save(model, folder / "mxfp4", mxfp4_experts=True, max_shard_bytes=1e12)
    del model
    openk3.save(openk3.load(folder / "mxfp4", experts="packed"), folder / "scattered",
                mxfp4_experts=True, max_shard_bytes=40e6)  # fmt: skip


def read_two_threads(folder: Path) -> int:
    """Two threads read every file of a folder into fresh memory; returns the bytes."""
    total, jobs = 0, []
    for path in sorted(folder.glob("*.safetensors")):
        memory = np.empty(path.stat().st_size, np.uint8)
        handle = os.open(path, os.O_RDONLY)
        jobs += [(handle, memory, start) for start in range(0, memory.size, CHUNK)]
        total += memory.size

    def read(job: tuple[int, np.ndarray, int]) -> None:
        handle, memory, start = job
        os.preadv(handle, [memory[start : start + CHUNK].data], start)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, jobs))
    for handle in {handle for handle, *_ in jobs}:
        os.close(handle)
    return total


def read_and_fill(folder: Path, fresh: int) -> None:
    """Two threads read every file through small buffers and fill `fresh` bytes of new memory."""
    paths = sorted(folder.glob("*.safetensors"))
    total = sum(path.stat().st_size for path in paths)
    memory = allocate_lasting((fresh,), torch.uint8)
    piece, done, jobs, local = 1 << 20, 0, [], threading.local()
    for path in paths:
        size, handle = path.stat().st_size, os.open(path, os.O_RDONLY)
        jobs += [(handle, start, min(CHUNK, size - start), done) for start in range(0, size, CHUNK)]
        done += size

    def work(job: tuple[int, int, int, int]) -> None:
        handle, start, num_bytes, before = job
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(piece)
        for at in range(start, start + num_bytes, piece):
            os.preadv(handle, [local.buffer], at)
            first, last = (min(before + x, total) * fresh // total for x in (at, at + piece))
            ctypes.memset(memory.data_ptr() + first, 1, last - first)  # frees the interpreter

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, jobs))
    for handle in {handle for handle, *_ in jobs}:
        os.close(handle)


def options(way: str) -> dict:
    """What a way passes to openk3.load."""
    return {key: value for key, value in WAYS[way].items() if key != "files"}


def model_bytes(model: K3) -> int:
    """Bytes of all parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors)


def best_of(call: Callable[[], object], repeats: int) -> float:
    """Shortest of `repeats` runs, in seconds; what a run made is freed outside the clock."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        made = call()
        best = min(best, time.perf_counter() - start)
        del made
    return best


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10


def measure_memory(folder: Path, way: str) -> dict[str, float]:
    """Load once; the peak of anonymous memory over what was there before."""
    openk3.load(folder / "warm", **options(way)) if (folder / "warm").exists() else None
    before, peak, stop = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.0005):
            peak[0] = max(peak[0], anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = openk3.load(folder / WAYS[way]["files"], **options(way))
    stop.set()
    watcher.join()
    return {"peak": max(peak[0], anonymous()) - before, "model": model_bytes(model)}


def full_size(folder: Path) -> None:
    """Open a K3 of the published size: its 497,220 tensors in files that are all holes.

    Proves names, shapes, offsets and mapping at full size without the weights; needs about 130 MB
    of disk, and memory for the tables only.
    """
    from openk3.checkpoint.hf.configs import published_config
    from openk3.checkpoint.hf.folder import INDEX
    from openk3.checkpoint.hf.layout import published
    from openk3.checkpoint.hf.write import ShardWriter, plan_shards

    config = preset("k3")
    with ShardWriter(folder, list(plan_shards([list(published(config))], int(16.5e9)))) as writer:
        index = {"metadata": {}, "weight_map": writer.weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(
        json.dumps(published_config(config, None, packed=True, dtype="bfloat16"))
    )
    before, start = anonymous(), time.perf_counter()
    model = openk3.load(folder, experts="packed")
    print(f"{model_bytes(model):,} bytes of weights opened in {time.perf_counter() - start:.1f} s, "
          f"{(anonymous() - before) / 1e9:.2f} GB of memory")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="bfloat16 bytes of the model")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--full-size", action="store_true", help=" ".join(
        (full_size.__doc__ or "").split("\n")[0].split()))  # fmt: skip
    parser.add_argument("--memory", metavar="WAY", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        print(json.dumps(measure_memory(args.folder, args.memory)))
        return
    folder = args.folder or Path(tempfile.mkdtemp(prefix="openk3-load-"))
    if args.full_size:
        full_size(folder)
        if args.folder is None:
            shutil.rmtree(folder)
        return
    if not (folder / "scattered").exists():
        write_files(folder, args.gb)
    print(f"{platform.processor() or 'cpu'}, {os.cpu_count()} cores, torch {torch.__version__}, "
          f"{date.today()}, warm page cache")  # fmt: skip
    print(f"{'':46}{'s':>8}{'file GB/s':>11}{'model GB/s':>12}{'peer s':>8}{'floor s':>8}"
          f"{'x read':>8}{'floor x':>10}{'x model':>9}{'peak/model':>12}")  # fmt: skip
    for way, how in WAYS.items():
        report(folder, way, folder / how["files"], args.repeats)
    if args.folder is None:
        shutil.rmtree(folder)


def report(folder: Path, way: str, files: Path, repeats: int) -> None:
    """One row: the peer and ours in turn, so that a busy machine disturbs both alike."""
    child = subprocess.run(
        [sys.executable, __file__, "--folder", str(folder), "--memory", way],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    memory = json.loads(child.stdout)
    size = read_two_threads(files)
    ours = peer = floor = float("inf")
    for _ in range(repeats):
        peer = min(peer, best_of(lambda: read_two_threads(files), 1))
        ours = min(ours, best_of(lambda: openk3.load(files, **options(way)), 1))
        floor = min(floor, best_of(lambda: read_and_fill(files, memory["peak"]), 1))
    made = memory["model"]
    print(f"{way:46}{ours:8.3f}{size / ours / 1e9:11.2f}{made / ours / 1e9:12.2f}{peer:8.3f}"
          f"{floor:8.3f}{peer / ours:8.2f}{peer / floor:10.2f}{made / ours / (size / peer):9.2f}"
          f"{memory['peak'] / made:12.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
