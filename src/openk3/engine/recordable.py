"""Which models can be recorded as C++ kernels, and whether a recorded one is still the same."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from openk3.model.block import K3Layer
from openk3.model.k3 import K3
from openk3.model.kda import KimiDeltaAttention, ShortConv
from openk3.model.layers import RMSNorm, SituMLP
from openk3.model.mla import GatedMLA
from openk3.model.moe import Experts, LatentMoE, Router
from openk3.model.ports import LocalDispatcher
from openk3.ops.native import BACKENDS

KNOWN = {
    K3, K3Layer, RMSNorm, nn.Linear, nn.Embedding, nn.ModuleList, SituMLP, KimiDeltaAttention,
    ShortConv, GatedMLA, LatentMoE, Router, Experts,
}  # fmt: skip
"""What the recording knows to compute. Anything else, an adapter say, would be left out."""
APART = ("vision_tower", "mm_projector", "mtp")
"""Parts of a model that are not on the way from a token to its logits."""


def modules_of(model: K3) -> Iterator[nn.Module]:
    """Those between a token and its logits."""
    yield model
    for name, part in model.named_children():
        if name not in APART:
            yield from part.modules()


def unfit(model: K3) -> str | None:
    """Why a model cannot be recorded, or None."""
    head = model.lm_head.weight
    usable, reason = BACKENDS.backends[0].usable(
        device=head.device, dtype=head.dtype, taps=model.config.linear_attn.short_conv_kernel_size
    )
    if not usable:
        return reason
    return next(filter(None, map(_problem, modules_of(model))), None)


def _problem(module: nn.Module) -> str | None:
    if type(module) not in KNOWN or module._forward_hooks or module._forward_pre_hooks:
        return f"{type(module).__name__} modules, or hooks on modules, are not compiled"
    if isinstance(module, LatentMoE) and (
        type(module.dispatcher) is not LocalDispatcher or type(module.experts) is not Experts
    ):
        return "experts that are packed or lie elsewhere are not compiled"
    if isinstance(module, nn.Linear) and module.bias is not None:
        return "projections with a bias are not compiled"
    for weight in module.parameters(recurse=False):
        if weight.dtype != torch.float32 or not weight.is_contiguous():
            return f"weights of {weight.dtype}, or that do not lie in one piece, are not compiled"
    return None


class Standing:
    """What a recording stands on: the modules and tensors of a model, and where these lie.

    Whoever trains or adapts the model may copy new numbers into its weights, which a recording
    sees, or move them, replace modules and add hooks, which it does not.
    """

    def __init__(self, model: K3) -> None:
        modules = list(modules_of(model))
        self._children = [m._modules for m in modules if m._modules]
        self._extras = [x for m in modules for x in (m._forward_hooks, m._forward_pre_hooks)]
        # whether a module without parts was given any is as cheap to see as whether it has hooks
        self._extras += [m._modules for m in modules if not m._modules]
        self._weights: list[tuple[Any, str]] = [
            (table, name)
            for m in modules
            for table in (m._parameters, m._buffers)
            for name, x in table.items()
            if x is not None
        ]
        self._modules, self._extended = self._parts(), any(self._extras)
        self._places = self._where()

    def _parts(self) -> list[nn.Module | None]:
        return [*chain.from_iterable(map(dict.values, self._children))]

    def _where(self) -> list[int]:
        return [table[name].data_ptr() for table, name in self._weights]

    def holds(self) -> bool:
        """Whether all is as it was. Takes some microseconds: it is asked before every step."""
        return (
            self._parts() == self._modules
            and any(self._extras) == self._extended
            and self._where() == self._places
        )
