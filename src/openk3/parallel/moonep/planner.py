"""Which rank computes which tokens: the perfectly balanced plan (K3 report §5.2.1, app. E).

Every rank gets the same number of rows whatever the router did. Experts live in contiguous blocks
of E / R; a rank with too few tokens is filled, exactly and once, from the fullest rank, whose
experts it then holds for this layer as redundant copies. One donor per receiver bounds the copies
by E / R. Everything follows from the global counts, so all ranks compute the same plan alone.

Three things this package must never break:
1. The token map is a bijection: every (token, choice) has one row, every row one pair, and rank d
   computes exactly `capacities(total, R)[d]` rows.
2. A redundant expert's gradient is staged in float32 and reaches its home rank exactly once.
3. The backward pass moves tokens by the saved map of the forward pass; a checkpointed forward
   that runs again rebuilds the same plan, since a plan is a function of integers alone.

Legend: R ranks, E experts.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import torch

from openk3.errors import InputError


@dataclass(frozen=True)
class Plan:
    """Who computes what."""

    alloc: Any
    """[R, E] int64: tokens of expert e computed on rank d. A tensor where the counts were one."""
    redundant: list[list[int]]
    """For each rank the experts of other ranks it computes, ascending."""


def plan(counts: Any) -> Plan:
    """counts [R, E] integers (tokens of expert e held by rank r) -> the balanced plan.

    Takes a tensor, an array or nested lists; works on the host. Raises InputError for counts that
    are not a matrix of non-negative integers, or experts that do not divide by ranks.
    """
    is_tensor = isinstance(counts, torch.Tensor)
    matrix = counts.cpu().numpy() if is_tensor else np.asarray(counts)
    check_shape(matrix.shape)
    if matrix.dtype.kind not in "iu" or (matrix.size and int(matrix.min()) < 0):
        raise InputError(f"counts must be integers of at least 0, not {matrix.dtype}")
    alloc = solve(matrix.astype(np.int64).sum(0), len(matrix))
    foreign = alloc.copy()
    for rank, block in enumerate(home_blocks(alloc.shape[1], len(alloc))):
        foreign[rank, block] = 0
    redundant = [np.flatnonzero(row).tolist() for row in foreign]
    return Plan(torch.from_numpy(alloc).to(counts.device) if is_tensor else alloc, redundant)


def check_shape(shape: tuple[int, ...]) -> None:
    """Raises InputError unless `shape` is [R, E] with E a multiple of R."""
    if len(shape) != 2 or not shape[0] or not shape[1]:
        raise InputError(f"counts must be a matrix [ranks, experts], not of shape {list(shape)}")
    if shape[1] % shape[0]:
        raise InputError(
            f"{shape[1]} experts do not divide by {shape[0]} ranks; choose an expert-parallel size "
            "that divides the number of experts"
        )


def home_blocks(num_experts: int, num_ranks: int) -> list[slice]:
    """The experts each rank owns: [r E/R, (r + 1) E/R)."""
    block = num_experts // num_ranks
    return [slice(r * block, (r + 1) * block) for r in range(num_ranks)]


def capacities(total: int, num_ranks: int) -> np.ndarray:
    """[R] rows each rank computes: floor(total / R), and one more on the first total mod R."""
    return total // num_ranks + (np.arange(num_ranks) < total % num_ranks)


def solve(load: np.ndarray, num_ranks: int) -> np.ndarray:
    """load [E] int64, tokens of each expert anywhere -> alloc [R, E]."""
    alloc = np.zeros((num_ranks, len(load)), np.int64)
    balance = load.reshape(num_ranks, -1).sum(1) - capacities(int(load.sum()), num_ranks)
    quotas = _fill(balance)
    for home, block in enumerate(home_blocks(len(load), num_ranks)):
        left = load[block].copy()
        for rank, expert, tokens in _share_out(left.tolist(), quotas[home]):
            alloc[rank, block.start + expert] = tokens
            left[expert] -= tokens
        alloc[home, block] = left
    return alloc


def _fill(balance: np.ndarray) -> list[list[tuple[int, int]]]:
    """For each donor its (receiver, tokens): the emptiest rank is filled from the fullest.

    A donor may fall below its share by that and is then filled itself, later and from one donor;
    a filled rank never becomes empty again, so R - 1 moves are enough (as for an alias table).
    """
    quotas: list[list[tuple[int, int]]] = [[] for _ in balance]
    while True:
        donor, receiver = int(balance.argmax()), int(balance.argmin())
        if balance[donor] <= 0:
            return quotas
        quotas[donor].append((receiver, int(-balance[receiver])))
        balance[donor] += balance[receiver]
        balance[receiver] = 0


def _share_out(load: list[int], quotas: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(rank, expert, tokens): the largest open quota takes from the largest expert, repeatedly."""
    ranks = [(-tokens, rank) for rank, tokens in quotas]
    experts = [(-tokens, expert) for expert, tokens in enumerate(load)]
    heapify(ranks)
    heapify(experts)
    shares = []
    while ranks:
        (quota, rank), (held, expert) = heappop(ranks), heappop(experts)
        moved = min(-quota, -held)
        shares.append((rank, expert, moved))
        if quota + moved:
            heappush(ranks, (quota + moved, rank))
        if held + moved:
            heappush(experts, (held + moved, expert))
    return shares
