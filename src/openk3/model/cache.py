"""The dense decode cache: every layer's memory as plain tensors."""

import torch
from torch import Tensor

from openk3.model.ports import KdaState


class DenseCache:
    """A MixerState for a batch of sequences that advance together."""

    def __init__(self) -> None:
        self.kda_states: dict[int, KdaState] = {}
        self.latents: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_tokens = 0

    def advance(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    def kda(self, layer: int) -> KdaState | None:
        return self.kda_states.get(layer)

    def set_kda(self, layer: int, state: KdaState) -> None:
        self.kda_states[layer] = state

    def extend(self, layer: int, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.latents:
            old_latent, old_rope = self.latents[layer]
            latent = torch.cat([old_latent, latent], 1)
            k_rope = torch.cat([old_rope, k_rope], 1)
        self.latents[layer] = latent, k_rope
        return latent, k_rope
