"""The float32 weights of a sharded model: `Masters` of which every process holds its rows.

FSDP2 keeps them and makes the layers' copies of them whenever it gathers, so there is no second set
to publish.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from openk3.checkpoint.sharded import Box, whole_bytes
from openk3.config.recipe import Recipe
from openk3.errors import ConfigError
from openk3.model.k3 import K3
from openk3.model.ports import LocalDispatcher, TokenDispatcher
from openk3.optim.groups import assign_all
from openk3.optim.optimizer import Optimizer
from openk3.parallel.alltoall import AllToAllDispatcher
from openk3.parallel.layout import check, resolve
from openk3.parallel.mesh import Mesh
from openk3.parallel.moonep import MoonEPDispatcher
from openk3.parallel.muon import ShardedMuon
from openk3.parallel.world import World, pick_dtype, sum_all
from openk3.parallel.zero import Sharded


class ShardedMasters:
    """Same use as `Masters`; `weights` are this process's rows."""

    def __init__(self, sharded: Sharded) -> None:
        self.sharded, self.model = sharded, sharded.model
        self.weights = {name: sharded.local(name) for name in sharded.pieces}
        self.rows: Mapping[str, tuple[int, int]] = {
            name: piece.rows for name, piece in sharded.pieces.items()
        }

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around a forward and backward pass; `last` completes the step's gradients."""
        return self.sharded.micro_batch(last=last)

    def grads(self) -> list[Tensor]:
        """The gradients of the rows here, in the same order everywhere; a missing one is zeros."""
        for name, weight in self.weights.items():
            grad = self.sharded.grad(name)
            weight.grad = torch.zeros_like(weight) if grad is None else grad
        return [w.grad for w in self.weights.values() if w.grad is not None]

    def summed_grads(self, world: World) -> list[Tensor]:
        """The gradients of all tokens: FSDP has summed all but those that it does not know."""
        grads = self.grads()
        kept = [g for g, p in zip(grads, self.sharded.pieces.values(), strict=True) if p.kept]
        sum_all(kept, self.sharded.mesh.tokens)
        return grads

    def norm(self, grads: list[Tensor]) -> float:
        """Of all gradients as one vector: every element counts once, wherever it lies."""
        squares = torch.zeros(2, dtype=torch.float64, device=self.sharded.mesh.device)
        for grad, piece in zip(grads, self.sharded.pieces.values(), strict=True):
            norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
            squares[int(piece.kept)] += norm.double().square()
        dist.all_reduce(squares[:1], group=self.sharded.mesh.state)
        return float(squares.sum().sqrt())

    def clear_grads(self) -> None:
        """Forget the gradients."""
        for name, weight in self.weights.items():
            weight.grad = self.sharded.parameters[name].grad = None

    def publish(self) -> None:
        """Nothing to do: the next gathering takes the new values."""

    def release(self) -> None:
        """Drop what evaluating or sampling has gathered."""
        self.sharded.release()

    def num_bytes(self, optimizer: Optimizer) -> int:
        """Size of a checkpoint, all processes together."""
        return sum(whole_bytes(named) for named in self.boxes(optimizer).values())

    def boxes(self, optimizer: Optimizer) -> dict[str, dict[str, Box]]:
        """What a checkpoint holds, as the rows that are here."""
        tensors = {"model": self.state(), "optimizer": optimizer.state()}
        return {
            part: {name: self._box(name, t) for name, t in named.items()}
            for part, named in tensors.items()
        }

    def _box(self, name: str, tensor: Tensor) -> Box:
        piece = self.sharded.pieces.get(re.sub(r"^(muon|adam\.[mv])\.", "", name))
        return Box.whole(tensor) if piece is None else Box(tensor, piece.shape, piece.rows[0])

    def state(self) -> dict[str, Tensor]:
        """The rows here and the model's persistent buffers by published name; not copies."""
        return {**self.weights, **dict(self._buffers())}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, module in self.sharded.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}", buffer


def build_sharded(recipe: Recipe, world: World) -> tuple[ShardedMasters, Optimizer]:
    """Model, weights and optimizer of this process, laid out as `recipe.parallel` says.

    The values are those of one process with the same seed, or undefined where the recipe starts
    from a model. Raises ConfigError.
    """
    layout = resolve(recipe.parallel, world.size)
    check(layout, recipe.model, batch_sequences=recipe.train.batch_sequences)
    for axis in ("pipeline", "context", "tensor"):
        if getattr(layout, axis) > 1:
            raise ConfigError(
                f"parallel.{axis} ({getattr(layout, axis)}) must be 1: this loop shares rows, "
                "state and experts only"
            )
    with torch.device("meta"):
        model = K3(recipe.model, seed=None)
    assignments = assign_all(model.named_parameters(), recipe.model)
    mesh = Mesh(layout, world.device)
    mesh.wait_up_to(world.patience)
    dtype = pick_dtype(recipe.train.compute_dtype, world.device)
    sharded = Sharded(model, mesh, recipe.parallel.zero, dtype, make_dispatcher(recipe, mesh))
    if not recipe.train.start_from:
        progress = partial(world.pulse.at, "drawing initial values")
        sharded.init(recipe.model.initializer_range, recipe.train.seed, progress)
    masters = ShardedMasters(sharded)
    make_muon = partial(ShardedMuon, pieces=sharded.pieces, group=mesh.state)
    return masters, Optimizer(masters.weights, assignments, recipe.optim, make_muon)


def make_dispatcher(recipe: Recipe, mesh: Mesh) -> TokenDispatcher:
    """What brings tokens to the experts of other processes."""
    if mesh.layout.expert == 1:
        return LocalDispatcher()
    kind = MoonEPDispatcher if recipe.parallel.balance_experts else AllToAllDispatcher
    return kind(mesh.expert, recipe.model.num_experts)
