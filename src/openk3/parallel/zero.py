"""Sharded parameters, gradients and optimizer state: FSDP2 as this model needs it.

    zero 1   each process keeps whole parameters and gradients of a step, and its rows of the rest
    zero 2   gradients are reduced to their rows after every micro-batch
    zero 3   a layer's parameters are gathered when it runs and dropped after it

A process holds rows of each parameter in float32; layers compute with gathered copies in the
products' dtype. Gradients add up in float32, as sums: a step's loss is already divided by the
tokens of the whole batch, so no reduction divides, whatever its group. What stays float32 in every
precision is small and whole everywhere; its gradients are summed once a step.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from openk3.errors import BackendError
from openk3.model.init import fill, init_buffers, keeps_float32
from openk3.model.k3 import K3
from openk3.model.moe import LatentMoE
from openk3.model.ports import ExpertWeights, TokenDispatcher
from openk3.parallel.experts import spread_experts
from openk3.parallel.layout import Layout, Span, expert_spans, row_spans
from openk3.parallel.mesh import Mesh


@dataclass(frozen=True)
class Piece:
    """Which rows of one parameter each process of a state group holds."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    spans: tuple[Span, ...]
    """Rows along the first dimension, by place; they tile it, or are all the whole of it."""
    place: int
    """This process's."""
    kept: bool = False
    """Whole everywhere, and summed apart from FSDP."""

    @property
    def rows(self) -> Span:
        """The rows that are here."""
        return self.spans[self.place]


def pieces_of(model: K3, layout: Layout, place: int) -> dict[str, Piece]:
    """The pieces of a model whose parameters are still whole, by name in model order."""
    pieces = {}
    for name, parameter in model.named_parameters():
        rows, kept = parameter.shape[0], keeps_float32(name)
        if kept:
            spans = ((0, rows),) * layout.state
        elif ".experts." in name:
            spans = expert_spans(rows, layout)
        else:
            spans = row_spans(rows, layout.state)
        pieces[name] = Piece(tuple(parameter.shape), spans, place, kept)
    return pieces


class Sharded:
    """A K3 that computes as one process would, and this process's rows of its parameters."""

    def __init__(
        self, model: K3, mesh: Mesh, zero: int, dtype: torch.dtype, dispatcher: TokenDispatcher
    ) -> None:
        """model: built on the meta device. dtype: of the products. `dispatcher` brings tokens to
        the experts of `mesh.expert`. The values are left undefined; see `init`."""
        self.model, self.mesh, self.zero = model, mesh, zero
        self.pieces = pieces_of(model, mesh.layout, mesh.place)
        spread_experts(model, mesh.expert, _Gathered(dispatcher))
        _wrap(model, mesh, zero, dtype)
        model.to_empty(device=mesh.device)
        init_buffers(model)
        for module in self._modules():
            # plain sums, which every backend has; the default is a mean over the module's group
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self.parameters = dict(model.named_parameters())

    def local(self, name: str) -> Tensor:
        """This process's rows of a parameter; shares its memory."""
        return _local(self.parameters[name])

    def grad(self, name: str) -> Tensor | None:
        """Their gradient, summed over the group that FSDP reduces over."""
        grad = self.parameters[name].grad
        return None if grad is None else _local(grad)

    @torch.no_grad()
    def init(self, std: float, seed: int, progress: Callable[[], None] = lambda: None) -> None:
        """The values that `init_weights` gives a whole model of this seed, one tensor at a time.

        progress: called after each.
        """
        rng = torch.Generator().manual_seed(seed)
        for name, piece in self.pieces.items():
            whole = torch.empty(piece.shape)
            fill(name, whole, std, rng)
            self.local(name).copy_(whole[slice(*piece.rows)])
            progress()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch; `last` completes the gradients."""
        model: Any = self.model
        model.set_requires_gradient_sync(last or self.zero > 1)
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or self.zero > 2)
        yield

    def release(self) -> None:
        """Drop gathered copies that a pass without a backward has left."""
        for module in self._modules():
            module.reshard()

    def _modules(self) -> Iterator[FSDPModule]:
        return (m for m in self.model.modules() if isinstance(m, FSDPModule))


class _Gathered:
    """Runs a dispatcher while the layer's experts are gathered, whatever it does with them."""

    def __init__(self, inner: TokenDispatcher) -> None:
        self.inner, self.skips_padding = inner, inner.skips_padding

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        return experts.dispatched(x, ids, weights, self.inner)


def _dispatched(
    experts: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor, inner: TokenDispatcher
) -> Tensor:
    return inner(x, ids, weights, experts)


def _wrap(model: K3, mesh: Mesh, zero: int, dtype: torch.dtype) -> None:
    # a layer hands the embeddings on as they are; nothing in the model works in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    kept = {p for name, p in model.named_parameters() if keeps_float32(name)}
    low = None if dtype == torch.float32 else dtype
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        "reshard_after_forward": zero > 2,
    }
    for moe in model.modules():
        if isinstance(moe, LatentMoE):
            experts: Any = moe.experts
            experts.dispatched = MethodType(_dispatched, experts)
            fully_shard(experts, mesh=mesh.experts, **options)
            register_fsdp_forward_method(experts, "dispatched")
    for layer in [*model.layers, *([model.mtp] if model.mtp else [])]:
        fully_shard(layer, mesh=mesh.dense, ignored_params=kept, **options)
    # the loss takes the head's weight after `hidden`, so what is outside the layers stays gathered
    options["reshard_after_forward"] = False
    fully_shard(model, mesh=mesh.dense, ignored_params=kept, **options)
    register_fsdp_forward_method(model, "hidden")
    if model.config.vision is not None:
        _reduce_unused(model)


def _reduce_unused(model: Any) -> None:
    """Reduce zeros for the vision tower where a process's rows hold no picture."""
    if not hasattr(model, "set_reduce_scatter_unused_params"):
        raise BackendError(
            f"a model with vision needs torch 2.13 or later for parallel.zero, not "
            f"{torch.__version__}: older ones cannot reduce what only some processes used"
        )
    model.set_reduce_scatter_unused_params(True)


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
