"""Float32 master weights of a model that computes in another dtype.

In float32 the model's parameters are the masters. In bfloat16 each low-precision parameter has a
float32 copy that the optimizer moves; gradients of all micro-batches add up in float32 on the copy.
A_log, dt_bias, convolutions, o_norm and the router bias are float32 in every case.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from openk3.errors import CheckpointError
from openk3.model.init import cast
from openk3.model.k3 import K3
from openk3.optim.optimizer import Optimizer
from openk3.parallel.world import World


class Masters:
    """`weights`: name -> float32 leaf whose `.grad` holds the step's gradient, in model order."""

    rows: Mapping[str, tuple[int, int]] | None = None
    """Which rows of each weight are here: all of them."""

    def __init__(self, model: K3, dtype: torch.dtype) -> None:
        """Casts `model`, which must be float32, to `dtype` in place."""
        self.model = model
        self.weights: dict[str, Tensor] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        # casting gives parameters new storage, so these keep the float32 values
        full = {name: p.detach() for name, p in model.named_parameters()}
        if dtype != torch.float32:
            cast(model, dtype)
        for name, parameter in model.named_parameters():
            if parameter.dtype == torch.float32:
                self.weights[name] = parameter
            else:
                self.weights[name] = self._shadow(parameter, full[name])

    def _shadow(self, parameter: Tensor, full: Tensor) -> Tensor:
        master = full.requires_grad_()

        def collect(p: Tensor) -> None:
            if p.grad is not None:
                wide = p.grad.float()
                master.grad = wide if master.grad is None else master.grad.add_(wide)
                p.grad = None

        parameter.register_post_accumulate_grad_hook(collect)
        self._copies.append((parameter, master))
        return master

    def grads(self) -> list[Tensor]:
        """The gradients, in the same order on every process; a missing one becomes zeros."""
        for weight in self.weights.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        return [w.grad for w in self.weights.values() if w.grad is not None]

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around a forward and backward pass; nothing is reduced before `summed_grads`."""
        yield

    def summed_grads(self, world: World) -> list[Tensor]:
        """`grads` of all processes together."""
        grads = self.grads()
        world.sum_all(grads)
        return grads

    def norm(self, grads: list[Tensor]) -> float:
        """Of all gradients as one vector, in float32."""
        return float(torch.nn.utils.get_total_norm(grads))

    def clear_grads(self) -> None:
        """Forget the gradients."""
        for weight in self.weights.values():
            weight.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model's parameters."""
        for parameter, master in self._copies:
            parameter.copy_(master)

    def release(self) -> None:
        """Nothing is gathered that could be dropped."""

    def num_bytes(self, optimizer: Optimizer) -> int:
        """Size of a checkpoint."""
        state = [*self.state().values(), *optimizer.state().values()]
        return sum(t.numel() * t.element_size() for t in state)

    def state(self) -> dict[str, Tensor]:
        """Masters and the model's persistent buffers by published name; not copies."""
        buffers = {n: t for n, t in self.model.state_dict().items() if n not in self.weights}
        return {**self.weights, **buffers}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a saved `state()` in. Raises CheckpointError naming what does not fit."""
        state = self.state()
        if odd := sorted(state.keys() ^ tensors.keys()):
            raise CheckpointError(
                f"the checkpoint's weights do not fit this model: {len(odd)} names differ, "
                f"first {odd[0]!r}"
            )
        for name, target in state.items():
            if target.shape != tensors[name].shape:
                raise CheckpointError(
                    f"weight {name!r} has shape {tuple(tensors[name].shape)} in the checkpoint; "
                    f"this model needs {tuple(target.shape)}"
                )
            target.copy_(tensors[name])
        self.publish()
