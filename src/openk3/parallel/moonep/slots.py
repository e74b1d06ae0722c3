"""Room for redundant experts, one bank for all layers."""

import torch
from torch import Tensor


class Slots:
    """Buffers that layers use in turn, grown to the most that was ever needed.

    Weights live from a prefetch to the products that read them, gradients from their product to
    their return; another layer then overwrites both, so a backward pass prefetches again.
    """

    def __init__(self) -> None:
        self._banks: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = {}

    def take(
        self, use: str, num: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """[num, width] of the bank for `use`, holding whatever its last user left."""
        key = use, width, dtype, device
        if key not in self._banks or len(self._banks[key]) < num:
            self._banks[key] = torch.empty(num, width, dtype=dtype, device=device)
        return self._banks[key][:num]

    @property
    def nbytes(self) -> int:
        """Bytes of all banks."""
        return sum(bank.nbytes for bank in self._banks.values())
