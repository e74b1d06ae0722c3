"""Bits per byte on held-out documents: comparable between tokenizers, and with compressors."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.data.loader import Batch
from openk3.data.rows import IGNORE
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
    num_captions: int = 0
    """Documents with pictures."""
    num_exact: int = 0
    """Those whose every target was the likeliest token: greedy decoding would write them."""

    @property
    def loss(self) -> float:
        """Nats per target token."""
        return self.nats / max(1, self.num_tokens)

    @property
    def bits_per_byte(self) -> float:
        """Code length of the text under the model."""
        return self.nats / math.log(2) / max(1, self.num_bytes)

    @property
    def exact(self) -> float | None:
        """Share of the documents with pictures whose text was right to the last token."""
        return self.num_exact / self.num_captions if self.num_captions else None


@torch.no_grad()
def evaluate(model: K3, batches: Iterable[Batch], world: World) -> Evaluation:
    """Score every target of this process's batches. Leaves no trace in the model."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(5, dtype=torch.float64, device=world.device)
    for batch in batches:
        world.pulse.at("evaluate")
        batch = batch.to(world.device)
        hidden = packed_hidden(model, batch)
        losses = token_losses(hidden, model.lm_head.weight, batch.targets.view(1, -1))
        sums[0] += losses.double().sum()
        sums[1] += batch.num_tokens
        sums[2] += batch.num_bytes
        if batch.pixel_values is not None:
            sums[3:] += exact_rows(model, hidden, batch.targets)
    model.train(was_training)
    nats, *counts = world.sum(sums).tolist()
    return Evaluation(nats, *map(int, counts))


def exact_rows(model: K3, hidden: Tensor, targets: Tensor) -> Tensor:
    """[2]: rows of targets [B, T] that have any, and those predicted without a mistake."""
    wanted = targets != IGNORE
    guesses = model.lm_head(hidden.view(targets.numel(), -1)[wanted.flatten()]).argmax(-1)
    wrong = torch.zeros_like(wanted)
    wrong[wanted] = guesses != targets[wanted]
    asked = wanted.any(1)
    return torch.stack([asked.sum(), (asked & ~wrong.any(1)).sum()])
