"""What a balanced plan costs at a given size and skew, without devices.

Routing is drawn; the plan and the token map are the real ones.

Legend: R ranks, E experts, k choices, S tokens a rank, L latent width, F inner width, N rows.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch

from openk3.errors import ConfigError
from openk3.parallel.experts import experts_per_rank
from openk3.parallel.moonep.planner import solve
from openk3.parallel.moonep.token_map import copies_pay, lay_out, map_tokens

ALIGN = 64
"""Rows of a group on a GPU."""


@dataclass(frozen=True)
class Workload:
    """One MoE layer on one rank, in bf16."""

    num_experts: int
    top_k: int
    tokens: int
    latent: int
    inner: int

    @property
    def rows(self) -> int:
        """S k."""
        return self.tokens * self.top_k

    @property
    def expert_values(self) -> int:
        """3 F L."""
        return 3 * self.inner * self.latent

    @property
    def forward_flops(self) -> float:
        """Of S k rows."""
        return 2.0 * self.rows * self.expert_values


@dataclass(frozen=True)
class Machine:
    """What the links and the products do."""

    bandwidth: float
    """Bytes a second out of a GPU."""
    flops: float
    """A second, in grouped products."""


@dataclass(frozen=True)
class Figures:
    """One layer of one size under one skew. Bytes and times of the worst rank unless said."""

    ranks: int
    skew: float
    """max / mean - 1 of the tokens per expert, as drawn."""
    plain_imbalance: float
    """max / mean of rows per rank without a plan."""
    slots_median: float
    """Redundant experts a rank computes."""
    slots_p95: float
    slots_max: int
    slots_bound: int
    """E / R."""
    moved_share: float
    """Of all rows: computed away from their home rank."""
    lent_max: int
    """Copies of experts that one rank sends."""
    token_bytes: int
    """Sent by rank 0 in one dispatch."""
    token_bytes_plain: int
    """Received by the busiest rank in one dispatch without a plan, every copy by itself."""
    expert_bytes: int
    """Copies sent by the busiest home, bf16; their gradients return as twice that."""
    buffer_bytes: int
    """Two row buffers."""
    slot_bytes: int
    """Room for E / R experts in bf16 and their gradients in float32."""
    plan_ms: float
    """Of the reference planner on this CPU, best of five."""
    exposed_ms: float
    """Forward and backward: five token moves, and what of the prefetch outlasts own experts."""
    plain_loss_ms: float
    """By how much the busiest rank of plain expert parallelism computes longer, both passes."""


def simulate(
    work: Workload, machine: Machine, num_ranks: int, skew: float, seed: int = 0
) -> Figures:
    """Draw one step's routing and plan it.

    Raises ConfigError if the ranks do not divide the experts or the skew is impossible: no expert
    can get more than every token, so at most E / k - 1.
    """
    block = experts_per_rank(work.num_experts, num_ranks)
    rng = np.random.default_rng([seed, num_ranks, int(skew * 1000)])
    share = popularity(work, skew, rng)
    first, counts = _draw_all(work, share, num_ranks, rng)
    load = counts.sum(0)
    alloc = solve(load, num_ranks)

    home = np.arange(work.num_experts) // block
    foreign = alloc * (home != np.arange(num_ranks)[:, None])
    slots = (foreign > 0).sum(1)
    lent = np.bincount(home, weights=(foreign > 0).sum(0), minlength=num_ranks)
    by_home = load.reshape(num_ranks, -1).sum(1)
    imbalance = float(by_home.max() / by_home.mean())
    expert_bytes = 2 * work.expert_values * int(lent.max())
    width = 2 * work.latent
    token_bytes = _leaving(first, counts, alloc, num_ranks) * width
    return Figures(
        ranks=num_ranks,
        skew=float(load.max() / load.mean() - 1),
        plain_imbalance=imbalance,
        slots_median=float(np.median(slots)),
        slots_p95=float(np.percentile(slots, 95)),
        slots_max=int(slots.max()),
        slots_bound=block,
        moved_share=float(foreign.sum() / load.sum()),
        lent_max=int(lent.max()),
        token_bytes=token_bytes,
        token_bytes_plain=int((by_home - _staying(counts)).max()) * width,
        expert_bytes=expert_bytes,
        buffer_bytes=2 * width * (work.rows + 2 * block * (ALIGN - 1)),
        slot_bytes=(2 + 4) * work.expert_values * block,
        plan_ms=1e3 * min(_time(load, num_ranks) for _ in range(5)),
        exposed_ms=1e3 * _exposed(work, machine, token_bytes, expert_bytes, foreign),
        plain_loss_ms=3e3 * work.forward_flops / machine.flops * (imbalance - 1),
    )


def _time(load: np.ndarray, num_ranks: int) -> float:
    begin = time.perf_counter()
    solve(load, num_ranks)
    return time.perf_counter() - begin


def popularity(work: Workload, skew: float, rng: np.random.Generator) -> np.ndarray:
    """[E] chance of each expert to be among a token's k: lognormal, max / mean = 1 + skew."""
    most = work.num_experts / work.top_k - 1
    if not 0 <= skew <= most:
        raise ConfigError(
            f"a skew of {skew:g} is impossible with {work.num_experts} experts, {work.top_k} a "
            f"token; allowed: 0 to {most:g}"
        )
    spread = rng.standard_normal(work.num_experts)
    spread -= spread.max()
    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        weight = np.exp(middle * spread)
        low, high = (middle, high) if 1 / weight.mean() - 1 < skew else (low, middle)
    weight = np.exp(low * spread)
    return work.top_k * weight / weight.sum()


def draw_routing(share: np.ndarray, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """[S, k] distinct experts a token, each with its exact chance (systematic sampling)."""
    order = rng.permutation(len(share))
    upper = share[order].cumsum()
    points = rng.random((tokens, 1)) + np.arange(round(upper[-1]))
    return order[np.searchsorted(upper, points, side="right").clip(max=len(share) - 1)]


def _draw_all(
    work: Workload, share: np.ndarray, num_ranks: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Rank 0's ids [S, k] and the counts [R, E] of all ranks."""
    first, counts = None, []
    for _ in range(num_ranks):
        ids = draw_routing(share, work.tokens, rng)
        first = ids if first is None else first
        counts.append(np.bincount(ids.reshape(-1), minlength=work.num_experts))
    assert first is not None, "there is at least one rank"
    return first, np.stack(counts)


def _staying(counts: np.ndarray) -> np.ndarray:
    """[R] rows whose experts live where their tokens are."""
    num_ranks = len(counts)
    return np.einsum("rrb->r", counts.reshape(num_ranks, num_ranks, -1))


def _leaving(ids: np.ndarray, counts: np.ndarray, alloc: np.ndarray, num_ranks: int) -> int:
    """Tokens that rank 0 sends to others under the plan."""
    layout = lay_out(torch.from_numpy(counts), torch.from_numpy(alloc))
    share = copies_pay(num_ranks, ids.shape[1])
    tokens = map_tokens(torch.from_numpy(ids), layout, 0, share_copies=share)
    return int((tokens.travels & (tokens.rank != 0)).sum())


def _exposed(
    work: Workload, machine: Machine, token_bytes: int, expert_bytes: int, foreign: np.ndarray
) -> float:
    """Seconds. Forward: dispatch, return. Backward: input, gradient, return.

    Each of the two prefetches hides behind the products of own experts, on the rank that has least
    of them.
    """
    moves = 5 * token_bytes / machine.bandwidth
    own_rows = work.rows - int(foreign.sum(1).max())
    product = work.forward_flops / machine.flops * own_rows / work.rows
    prefetch = expert_bytes / machine.bandwidth
    return moves + 2 * max(0.0, prefetch - product)
