"""A model whose routed experts are spread over the ranks of one group."""

import torch.distributed as dist
from torch import nn

from openk3.errors import ConfigError
from openk3.model.k3 import K3
from openk3.model.moe import Experts, LatentMoE
from openk3.model.ports import TokenDispatcher


def spread_experts(model: K3, group: dist.ProcessGroup, dispatcher: TokenDispatcher) -> None:
    """Keep this rank's block [r E/R, (r + 1) E/R) of every layer's experts, and dispatch.

    The stacked parameters are replaced by new leaves, so do this before an optimizer or FSDP sees
    the model. One dispatcher serves all layers. Raises ConfigError if R does not divide E, or the
    experts are not stacked parameters.
    """
    for moe in model.modules():
        if isinstance(moe, LatentMoE):
            moe.experts = keep_block(moe.experts, group.rank(), group.size())
            moe.dispatcher = dispatcher


def keep_block(experts: object, rank: int, num_ranks: int) -> Experts:
    """The same `Experts`, holding rank's block of E / R."""
    if not isinstance(experts, Experts):
        raise ConfigError(
            f"expert parallelism needs resident experts, not {type(experts).__name__}"
        )
    block = experts_per_rank(experts.num_experts, num_ranks)
    for name, weight in list(experts.named_parameters()):
        part = weight.detach()[rank * block : (rank + 1) * block].clone()
        setattr(experts, name, nn.Parameter(part, requires_grad=weight.requires_grad))
    experts.num_experts = block
    return experts


def experts_per_rank(num_experts: int, num_ranks: int) -> int:
    """E / R. Raises ConfigError where it is no whole number."""
    if num_experts % num_ranks:
        raise ConfigError(
            f"{num_experts} experts do not divide by an expert-parallel size of {num_ranks}; "
            "choose a size that divides num_experts"
        )
    return num_experts // num_ranks
