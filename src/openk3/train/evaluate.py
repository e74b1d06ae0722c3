"""Bits per byte on held-out documents: comparable between tokenizers, and with compressors."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from openk3.data.loader import Batch
from openk3.model.k3 import K3
from openk3.ops.loss import token_losses
from openk3.parallel.world import World
from openk3.train.step import packed_hidden


@dataclass(frozen=True)
class Evaluation:
    """Sums over all processes."""

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def loss(self) -> float:
        """Nats per target token."""
        return self.nats / max(1, self.num_tokens)

    @property
    def bits_per_byte(self) -> float:
        """Code length of the text under the model."""
        return self.nats / math.log(2) / max(1, self.num_bytes)


@torch.no_grad()
def evaluate(model: K3, batches: Iterable[Batch], world: World) -> Evaluation:
    """Score every target of this process's batches. Leaves no trace in the model."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    for batch in batches:
        batch = batch.to(world.device)
        losses = token_losses(
            packed_hidden(model, batch), model.lm_head.weight, batch.targets.view(1, -1)
        )
        sums[0] += losses.double().sum()
        sums[1] += batch.num_tokens
        sums[2] += batch.num_bytes
    model.train(was_training)
    nats, num_tokens, num_bytes = world.sum(sums).tolist()
    return Evaluation(nats, int(num_tokens), int(num_bytes))
