"""The planner on the device of its counts."""

import torch
from torch import Tensor

from openk3.ops.triton_support import launch, power_of_two
from openk3.parallel.moonep import planner_kernels as kernels


def solve_on_device(counts: Tensor) -> Tensor:
    """counts [R, E] int64 (fewer than 2^31 tokens in all) -> alloc [R, E], as `planner.solve`."""
    num_ranks, num_experts = counts.shape
    block = num_experts // num_ranks
    alloc = torch.empty_like(counts)
    launch(
        kernels.plan_ranks, (1,), counts, alloc, R=num_ranks, B=block,
        R_PAD=power_of_two(num_ranks), B_PAD=power_of_two(block), num_warps=4,
    )  # fmt: skip
    return alloc
