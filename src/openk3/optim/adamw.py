"""AdamW for what Muon does not move: embedding, head, norms, gates, convolutions, AttnRes queries.

    m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
    W <- W - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) - lr wd W

Written out rather than taken from torch.optim, whose import costs seconds and whose state is
keyed by object; this state is a dict of named tensors.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


class AdamW:
    """One group: float32 weights with one decay and one rate."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        lr_scale: float = 1.0,
    ) -> None:
        self.names, self.weights = list(weights), list(weights.values())
        self.betas, self.eps = betas, eps
        self.weight_decay, self.lr_scale = weight_decay, lr_scale
        self.first = [torch.zeros_like(w) for w in self.weights]
        self.second = [torch.zeros_like(w) for w in self.weights]
        self.count = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from `.grad` of every weight (None counts as zero)."""
        if not self.weights:
            return
        lr *= self.lr_scale
        b1, b2 = self.betas
        self.count += 1
        t = int(self.count)
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights]
        torch._foreach_lerp_(self.first, grads, 1 - b1)
        torch._foreach_mul_(self.second, b2)
        torch._foreach_addcmul_(self.second, grads, grads, 1 - b2)
        scale = torch._foreach_sqrt(self.second)
        torch._foreach_div_(scale, math.sqrt(1 - b2**t))
        torch._foreach_add_(scale, self.eps)
        torch._foreach_mul_(self.weights, 1 - lr * self.weight_decay)
        torch._foreach_addcdiv_(self.weights, self.first, scale, -lr / (1 - b1**t))

    def state(self) -> dict[str, Tensor]:
        """`m.NAME`, `v.NAME` by parameter; the tensors themselves, not copies."""
        first = {f"m.{n}": x for n, x in zip(self.names, self.first, strict=True)}
        return first | {f"v.{n}": x for n, x in zip(self.names, self.second, strict=True)}
