"""Initial weights.

Matrices are normal with the config's standard deviation; AttnRes queries are zero, so every mix
starts as the plain average; A_log is zero and dt_bias is Mamba-2's inverse softplus of a
log-uniform step, which the lower-bounded gate turns into decays from slow to moderate (K3 report
§2.1.1, §2.2).
"""

import math

import torch
from torch import Tensor, nn

FLOAT32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
DT_MIN, DT_MAX = 1e-3, 1e-1


def keeps_float32(name: str) -> bool:
    """Whether a parameter or buffer of this name stays float32 in every precision."""
    return name.endswith(FLOAT32)


@torch.no_grad()
def init_weights(model: nn.Module, std: float, seed: int) -> None:
    """Fill every parameter of `model` from one seed, in name order, on the CPU's generator."""
    rng = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        fill(name, weight, std, rng)


def init_buffers(model: nn.Module) -> None:
    """Give the buffers of a model that was built without storage their first values."""
    for name, buffer in model.named_buffers():
        buffer.fill_(-torch.inf if name.endswith("max_logits") else 0)


def fill(name: str, weight: Tensor, std: float, rng: torch.Generator) -> None:
    """The first values of the whole parameter `name`; draws what it needs from `rng`."""
    if name.endswith(("norm.weight", "norm0.weight", "norm1.weight")):
        weight.fill_(1)
    elif name.endswith(("A_log", "_res_proj.weight")):
        weight.zero_()
    elif name.endswith("dt_bias"):
        span = torch.rand(weight.shape, generator=rng) * (math.log(DT_MAX) - math.log(DT_MIN))
        step = torch.exp(span + math.log(DT_MIN))
        weight.copy_(step + torch.log(-torch.expm1(-step)))
    elif name.endswith("conv1d.weight"):
        bound = weight.shape[-1] ** -0.5
        weight.copy_((torch.rand(weight.shape, generator=rng) * 2 - 1) * bound)
    else:
        weight.copy_(torch.randn(weight.shape, generator=rng) * std)


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast all floating parameters and buffers to `dtype`, except those kept in float32."""
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if tensor.is_floating_point() and not keeps_float32(name) and "max_logits" not in name:
            tensor.data = tensor.data.to(dtype)
    return model
