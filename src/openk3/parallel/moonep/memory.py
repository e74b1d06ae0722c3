"""Memory that every rank of a group can address: torch's symmetric memory over NVLink."""

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT = 256
"""Bytes."""


class Region(NamedTuple):
    """One tensor that exists on every rank."""

    here: Tensor
    peers: Tensor
    """[R] int64: its address on each rank, as this one sees it."""


class Memory(Protocol):
    """A block of bytes on every rank, addressable by all."""

    rank: int
    num_ranks: int
    base: Tensor
    """[bytes] uint8."""
    addresses: Tensor
    """[R] int64, on base's device: where each rank's block begins."""

    def barrier(self) -> None:
        """Work queued behind it sees what all ranks have queued before it."""
        ...


class SymmetricMemory:
    """`torch.distributed._symmetric_memory`: peers' memory mapped over NVLink, no multicast."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.rank, self.num_ranks = group.rank(), group.size()
        self.base = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        self.handle = symmetric.rendezvous(self.base, group)
        self.addresses = torch.tensor(self.handle.buffer_ptrs, dtype=torch.int64, device=device)

    def barrier(self) -> None:
        self.handle.barrier()


class Carver:
    """Cuts a block into regions, the same on every rank; without a block it only measures."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory, self.used = memory, 0

    def take(self, *shape: int, dtype: torch.dtype) -> Region:
        """The next region, of `shape`."""
        count = 1
        for n in shape:
            count *= n
        start, size = self.used, count * dtype.itemsize
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        if self.memory is None:
            return Region(torch.empty(0), torch.empty(0))
        here = self.memory.base[start : start + size].view(dtype).view(shape)
        return Region(here, self.memory.addresses + start)
