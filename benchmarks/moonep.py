"""Balanced expert parallelism beside plain all-to-all: times, rows and bytes under skew.

    python benchmarks/moonep.py                                       two one-thread gloo processes
    torchrun --nproc-per-node 2 benchmarks/moonep.py --device cuda    NCCL, and symmetric memory
    ... --check                                                       are they right?
    python benchmarks/moonep.py --planner                             the planner alone

Every dispatcher gets the same tokens in the same process; times are medians over the steps of the
slowest rank. `all at home`: every token's experts live on rank 0.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from openk3.model.moe import Experts
from openk3.ops import moe
from openk3.parallel.alltoall import AllToAllDispatcher
from openk3.parallel.experts import keep_block
from openk3.parallel.moonep import MoonEPDispatcher
from openk3.parallel.moonep.simulate import Workload, draw_routing, popularity

CPU_SHAPE = Workload(num_experts=16, top_k=4, tokens=2048, latent=256, inner=256)
GPU_SHAPE = Workload(num_experts=64, top_k=16, tokens=8192, latent=3584, inner=3072)
CHECK_TOKENS, CHECK_EXPERTS = 300, 16


@dataclass
class Case:
    """One rank's part of a step."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    d_out: torch.Tensor


def make_experts(shape: Workload, device: str, dtype: torch.dtype, seed: int = 0) -> Experts:
    experts = Experts.__new__(Experts)
    torch.nn.Module.__init__(experts)
    rng = torch.Generator(device).manual_seed(seed)
    wide, tall = (shape.inner, shape.latent), (shape.latent, shape.inner)
    for name, (rows, width) in (("w1", wide), ("w3", wide), ("w2", tall)):
        w = torch.randn(shape.num_experts, rows, width, generator=rng, device=device)
        setattr(experts, name, torch.nn.Parameter((w * width**-0.5).to(dtype)))
    experts.num_experts, experts.betas = shape.num_experts, (4.0, 25.0)
    return experts


def make_case(
    shape: Workload, skew: str, rank: int, ranks: int, device: str, dtype: torch.dtype,
    tokens: int | None = None,
) -> Case:  # fmt: skip
    import numpy as np

    tokens, rng = shape.tokens if tokens is None else tokens, np.random.default_rng(rank)
    if skew == "all at home":
        pool = shape.num_experts // ranks
        few = Workload(pool, shape.top_k, tokens, shape.latent, shape.inner)
        share = popularity(few, 0.0, rng)
    else:
        share = popularity(shape, float(skew), np.random.default_rng(0))
        share = -np.sort(-share)  # the popular ones all live on the first ranks
    ids = torch.from_numpy(draw_routing(share, tokens, rng)).to(device)
    torch.manual_seed(rank)
    x, d_out = (torch.randn(tokens, shape.latent, device=device, dtype=dtype) for _ in range(2))
    return Case(x, ids, torch.rand(ids.shape, device=device) + 0.1, d_out)


def dispatchers(
    shape: Workload, device: str, dtype: torch.dtype, one_sided: bool
) -> dict[str, Callable]:
    group = dist.group.WORLD
    found = {
        "plain": AllToAllDispatcher(group, shape.num_experts),
        "balanced": MoonEPDispatcher(group, shape.num_experts),
    }
    if one_sided:
        from openk3.parallel.moonep.symmetric import Shapes, over_nvlink

        shapes = Shapes(
            shape.num_experts, shape.top_k, shape.tokens, shape.latent, shape.inner, dtype
        )
        here = torch.device("cuda", torch.cuda.current_device())
        transport = over_nvlink(shapes, group, here)
        found["balanced, one-sided"] = MoonEPDispatcher(None, shape.num_experts, transport)
    return found


def step(dispatcher: Callable, case: Case, experts: Experts) -> list[torch.Tensor]:
    """[out, dx, dweights, dw1, dw3, dw2]."""
    x, weights = case.x.clone().requires_grad_(), case.weights.clone().requires_grad_()
    for w in experts.parameters():
        w.grad = None
    out = dispatcher(x, case.ids, weights, experts)
    out.backward(case.d_out)
    return [out.detach(), x.grad, weights.grad, experts.w1.grad, experts.w3.grad, experts.w2.grad]


def timed(call: Callable[[], object], device: str) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    taken = torch.tensor([time.perf_counter() - begin], device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def compare(device: str, repeats: int, one_sided: bool) -> None:
    shape = GPU_SHAPE if device == "cuda" else CPU_SHAPE
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts = keep_block(make_experts(shape, device, dtype), rank, ranks)
    if rank == 0:
        print(f"\n{shape}, {ranks} ranks, {dtype}: forward + backward of one layer, ms")
    found = dispatchers(shape, device, dtype, one_sided)
    for skew in ("0", "1", "all at home"):
        case = make_case(shape, skew, rank, ranks, device, dtype)
        times: dict[str, list[float]] = {name: [] for name in found}
        for i in range(repeats + 2):
            for name, dispatcher in found.items():  # in turn, so that all meet the same weather
                taken = timed(lambda d=dispatcher, c=case: step(d, c, experts), device)
                if i >= 2:
                    times[name].append(taken)
        for name, dispatcher in found.items():
            rows = torch.tensor([dispatcher.rows], device=device)
            every = [torch.empty_like(rows) for _ in range(ranks)]
            dist.all_gather(every, rows)
            if rank == 0:
                median = 1e3 * statistics.median(times[name])
                print(f"skew {skew:<12}{name:<21}{median:9.2f}   rows {[int(r) for r in every]}")
        if device == "cuda":
            if rank == 0:
                print(
                    f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True
                )
            if skew == "0":
                time_moves(found, case)


def check(device: str, one_sided: bool) -> None:
    """Three steps over poisoned memory against one device in float32; one without host reads."""
    shape, dtype, limit = CPU_SHAPE, torch.float32, 1e-5
    if device == "cuda":
        shape, dtype, limit = GPU_SHAPE, torch.bfloat16, 1e-2
    shape = replace(shape, num_experts=CHECK_EXPERTS, top_k=4, tokens=CHECK_TOKENS)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = make_experts(shape, device, dtype)
    experts = keep_block(make_experts(shape, device, dtype), rank, ranks)
    found = dispatchers(shape, device, dtype, one_sided)
    for skew, tokens in (("0", 300), ("2", 300 - 120 * rank), ("all at home", 300 * (1 - rank))):
        case = make_case(shape, skew, rank, ranks, device, dtype, tokens)
        wanted = one_device(case, whole, rank, ranks)
        for name, dispatcher in found.items():
            results = []
            for _ in range(3):
                junk = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(16)]
                del junk
                results.append(step(dispatcher, case, experts))
            errors = [relative(a, b) for a, b in zip(results[0], wanted, strict=True)]
            same = all(
                torch.equal(a, b) for r in results[1:] for a, b in zip(results[0], r, strict=True)
            )
            verdict = "right" if max(errors) < limit and same else "WRONG"
            shown = " ".join(f"{e:.0e}" for e in errors)
            print(
                f"rank {rank} skew {skew}, {tokens} tokens, {name}: {verdict}; rows "
                f"{dispatcher.rows}, relative errors {shown}, steps bitwise equal: {same}",
                flush=True,
            )
    if one_sided:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")  # any read by the host raises
        step(found["balanced, one-sided"], case, experts)
        torch.cuda.set_sync_debug_mode("default")
        print(f"rank {rank}: the one-sided step read nothing on the host")


def time_moves(found: dict[str, Callable], case: Case) -> None:
    """One dispatch and one return by themselves, between CUDA events."""
    for name, dispatcher in found.items():
        if not isinstance(dispatcher, MoonEPDispatcher):
            continue
        transport, route = dispatcher.transport, dispatcher.plan_route(case.ids, case.weights)
        rows = transport.scatter(route, case.x).clone()
        distinct = case.ids // (dispatcher.block)
        leaving = int((distinct != dist.get_rank()).any(1).sum()) * case.x.shape[1] * 2
        for what, call in (
            ("dispatch", lambda t=transport, r=route: t.scatter(r, case.x)),
            ("return", lambda t=transport, r=route, y=rows: t.gather(r, y)),
        ):
            micros = between_events(call)
            if dist.get_rank() == 0:
                print(
                    f"{what} {name}: {micros:.0f} us; {leaving / 1e6:.1f} MB leave a rank at least,"
                    f" {leaving / micros / 1e3:.0f} GB/s"
                )


def between_events(call: Callable[[], object], times: int = 20) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(3):
        call()
    events[0].record()
    for _ in range(times):
        call()
    events[1].record()
    torch.cuda.synchronize()
    return 1e3 * events[0].elapsed_time(events[1]) / times


def one_device(case: Case, whole: Experts, rank: int, ranks: int) -> list[torch.Tensor]:
    parts: list = [None] * ranks
    mine = [t.cpu() for t in (case.x, case.ids, case.weights, case.d_out)]
    dist.all_gather_object(parts, mine)
    x, ids, weights, d_out = (torch.cat(t).to(case.x.device) for t in zip(*parts, strict=True))
    leaves = [x.float().requires_grad_(), weights.requires_grad_()]
    experts = [w.detach().float().requires_grad_() for w in (whole.w1, whole.w3, whole.w2)]
    out = moe.expert_mlp(leaves[0], ids, leaves[1], *experts, *whole.betas)
    grads = torch.autograd.grad(out, [*leaves, *experts], d_out.float())
    begin = sum(len(p[0]) for p in parts[:rank])
    mine = slice(begin, begin + len(case.x))
    block = whole.num_experts // ranks
    home = slice(rank * block, (rank + 1) * block)
    return [out.detach()[mine], grads[0][mine], grads[1][mine], *(g[home] for g in grads[2:])]


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got.float() - wanted).norm() / wanted.norm().clamp(min=1e-20))


def time_planner() -> None:
    """Median of the reference on the CPU; on a GPU the kernel inside a CUDA graph."""
    import numpy as np

    from openk3.parallel.moonep.dispatch import allocate
    from openk3.parallel.moonep.planner import solve
    from openk3.parallel.moonep.token_map import lay_out, map_tokens

    for ranks in (8, 64):
        work = Workload(896, 16, 8192, 3584, 3072)
        for skew in (0.2, 10.0):
            rng = np.random.default_rng(1)
            share = popularity(work, skew, rng)
            ids = draw_routing(share, work.tokens, rng)
            counts = rng.multinomial(work.rows, share / share.sum(), size=ranks)
            counts[0] = np.bincount(ids.reshape(-1), minlength=896)
            times = []
            for _ in range(21):
                begin = time.perf_counter()
                alloc = solve(counts.sum(0), ranks)
                times.append(time.perf_counter() - begin)
            line = f"R={ranks} skew {skew}: reference {1e3 * statistics.median(times):.2f} ms"
            if torch.cuda.is_available():
                here, tokens = torch.from_numpy(counts).cuda(), torch.from_numpy(ids).cuda()
                found = allocate(here)
                assert torch.equal(found.cpu(), torch.from_numpy(alloc)), "plans differ"

                def tables(here=here, tokens=tokens, found=found):
                    map_tokens(tokens, lay_out(here, found, 64), 0)

                line += f", kernel {in_graph(lambda c=here: allocate(c)):.1f} us"
                print(line, flush=True)
                line = f"   and its token map {in_graph(tables):.0f} us"
            print(line, flush=True)


def in_graph(call: Callable[[], object], times: int = 20) -> float:
    """Microseconds of one call among `times` in a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    graph.replay()
    events[0].record()
    for _ in range(5):
        graph.replay()
    events[1].record()
    torch.cuda.synchronize()
    return 1e3 * events[0].elapsed_time(events[1]) / (5 * times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--collectives", action="store_true", help="no symmetric memory")
    parser.add_argument("--planner", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.planner:
        time_planner()
    elif "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        sys.exit(subprocess.call([*launcher, *sys.argv]))
    else:
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        one_sided = args.device == "cuda" and not args.collectives
        if args.check:
            check(args.device, one_sided)
        else:
            compare(args.device, args.repeats, one_sided)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
