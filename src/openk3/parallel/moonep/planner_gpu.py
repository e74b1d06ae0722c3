"""The planner on the device of its counts."""

import torch
from torch import Tensor

from openk3.ops.triton_support import launch
from openk3.parallel.moonep import planner_kernels as kernels


def solve_on_device(counts: Tensor) -> Tensor:
    """counts [R, E] int64 (fewer than 2^31 tokens in all) -> alloc [R, E], as `planner.solve`."""
    num_ranks, num_experts = counts.shape
    block = num_experts // num_ranks
    alloc = torch.empty_like(counts)
    pads = [1 << (n - 1).bit_length() for n in (num_ranks, block)]
    launch(
        kernels.plan_ranks, (1,), counts, alloc, R=num_ranks, B=block, R_PAD=pads[0],
        B_PAD=pads[1], num_warps=4,
    )  # fmt: skip
    return alloc
