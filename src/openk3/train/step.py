"""One optimizer step: gradients of a global batch, their sum over processes, the update.

The loss of a step is the sum over every target of every micro-batch of every process, divided by
how many there are: a mean over tokens, whatever the packing, accumulation or number of processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from openk3.config.recipe import OptimRecipe
from openk3.data.loader import Batch
from openk3.model.k3 import K3
from openk3.model.mtp import later_targets
from openk3.model.ports import Probe
from openk3.ops.loss import linear_cross_entropy
from openk3.optim.clip import clip_mla_weights
from openk3.optim.optimizer import Optimizer
from openk3.parallel.world import World
from openk3.train.guard import Guard
from openk3.train.masters import Masters

if TYPE_CHECKING:
    from openk3.train.sharded import ShardedMasters

MTP_WEIGHT = 0.3
"""Share of the MTP layer's loss in the gradient."""


class Loss(Protocol):
    """What a step minimises: the sum over a batch's targets, float32 scalar."""

    def __call__(self, model: K3, batch: Batch, probe: Probe | None = None) -> Tensor: ...


def next_token_loss(model: K3, batch: Batch, probe: Probe | None = None) -> Tensor:
    """Summed cross-entropy of every target, nats. Sequences of a batch do not see each other."""
    hidden = packed_hidden(model, batch, probe)
    loss = linear_cross_entropy(hidden, model.lm_head.weight, batch.targets.view(1, -1))
    if model.mtp is None or not model.training:
        return loss
    # the gradient of the extra guess only; the reported loss stays that of the next token
    extra = MTP_WEIGHT * mtp_loss(model, hidden, batch)
    return loss + extra - extra.detach()


def mtp_loss(model: K3, hidden: Tensor, batch: Batch) -> Tensor:
    """Summed cross-entropy of the MTP layer's guesses of the token after next, nats."""
    targets = batch.targets.view(1, -1)
    guessed = model.mtp_hidden(hidden, targets.clamp(min=0), cu_seqlens=batch.cu_seqlens)
    later = later_targets(batch.targets).view(1, -1)
    return linear_cross_entropy(guessed, model.lm_head.weight, later)


def packed_hidden(model: K3, batch: Batch, probe: Probe | None = None) -> Tensor:
    """Final hidden states [1, B * T, d] of a batch, whose sequences do not see each other."""
    # what follows a whole row's text is padding, which the text cannot see: no need to pack
    rows = batch if batch.whole_rows else batch.packed()
    hidden = model.hidden(
        rows.input_ids,
        cu_seqlens=None if batch.whole_rows else batch.cu_seqlens,
        pixel_values=batch.pixel_values,
        grid_thws=batch.grid_thws,
        valid=rows.valid,
        probe=probe,
    )
    return hidden.flatten(0, 1)[None]


@dataclass(frozen=True)
class StepResult:
    """What a step was, over all processes."""

    loss: float
    """Nats per target token."""
    grad_norm: float
    """Before clipping."""
    num_tokens: int
    """Targets."""
    num_positions: int
    """Positions computed, padding aside; more than the targets where pictures are read."""
    num_bytes: int
    bad: str | None
    """Why it was not applied."""
    max_logit: float | None = None
    """Largest Gated MLA logit."""
    clipped_heads: int = 0
    """MLA heads scaled down after the update."""


@dataclass
class Stepper:
    """The moving parts of a step."""

    model: K3
    masters: "Masters | ShardedMasters"
    optimizer: Optimizer
    guard: Guard
    recipe: OptimRecipe
    world: World
    loss: Loss = next_token_loss

    def __call__(
        self,
        batches: Sequence[Batch],
        lr: float,
        *,
        probe: Probe | None = None,
        before_update: Callable[[], None] | None = None,
    ) -> StepResult:
        """Take one step on this process's micro-batches at learning rate `lr`.

        `probe` watches the first micro-batch. `before_update` runs before the balancing counts of
        the step are used up.
        """
        counts = torch.tensor([[b.num_tokens, b.num_positions, b.num_bytes] for b in batches]).sum(
            0
        )
        counts = self.world.sum(counts.to(self.world.device))
        num_tokens, num_positions, num_bytes = (int(n) for n in counts)
        total = self._gradients(batches, num_tokens, probe)
        self.world.pulse.at("reduce")
        grads = self.masters.summed_grads(self.world)
        norm = self.masters.norm(grads)
        loss = float(self.world.sum(total)) / max(1, num_tokens)
        bad = self.guard.judge(loss, norm)
        if before_update is not None and bad is None:
            before_update()
        peak, clipped = self._forget() if bad else self._update(grads, norm, lr)
        self.masters.clear_grads()
        return StepResult(loss, norm, num_tokens, num_positions, num_bytes, bad, peak, clipped)

    def _gradients(self, batches: Sequence[Batch], num_tokens: int, probe: Probe | None) -> Tensor:
        total = torch.zeros((), device=self.world.device)
        for i, batch in enumerate(batches):
            self.world.pulse.at("forward and backward")
            with self.masters.micro_batch(last=i + 1 == len(batches)):
                loss = self.loss(self.model, batch, probe if i == 0 else None)
                (loss / max(1, num_tokens)).backward()
            total += loss.detach()
        return total

    def _update(self, grads: list[Tensor], norm: float, lr: float) -> tuple[float | None, int]:
        self.world.pulse.at("update")
        limit = self.recipe.clip_norm
        if 0 < limit < norm:
            torch._foreach_mul_(grads, limit / norm)
        self.optimizer.step(lr)
        peaks = {layer: self.world.max(p) for layer, p in self.model.max_logits().items()}
        clipped = clip_mla_weights(
            self.masters.weights,
            peaks,
            self.model.config,
            self.recipe.logit_cap,
            self.masters.rows,
        )
        self.masters.publish()
        self.model.update_balancing(self._sum)
        peak = float(torch.stack(list(peaks.values())).max()) if peaks else None
        return peak, int(clipped)

    def _sum(self, counts: Tensor) -> None:
        self.world.sum(counts)

    def _forget(self) -> tuple[None, int]:
        """Drop what the forward passes of a skipped step have counted."""
        self.model.max_logits(reset=True)
        for router in self.model.routers().values():
            router.margin_counts.zero_()
            router.load.zero_()
        return None, 0
