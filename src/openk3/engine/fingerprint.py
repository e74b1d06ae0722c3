"""A number of all weights, by which memories of one model are never mistaken for another's."""

import hashlib

import torch
from torch import Tensor, nn

AT_ONCE = 1 << 26
"""Bytes that are copied to be summed."""
ODD = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
"""Multipliers of a 64-bit mix."""


def of_weights(model: nn.Module) -> bytes:
    """16 bytes: a digest of the name, type, shape and every bit of each weight.

    The same on every device. It reads all weights once; a few bits of a single row count, as those
    that sparse training has changed."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in model.state_dict().items():
        digest.update(repr((name, str(weight.dtype), tuple(weight.shape))).encode())
        digest.update(_sum(weight).to_bytes(8, "little", signed=True))
    return digest.digest()


def _sum(weight: Tensor) -> int:
    """Of all 8-byte words, each mixed with its place."""
    total = torch.zeros((), dtype=torch.int64, device=weight.device)
    data = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    for first in range(0, len(data), AT_ONCE):
        part = data[first : first + AT_ONCE]
        words = torch.zeros(-(-len(part) // 8), dtype=torch.int64, device=weight.device)
        words.view(torch.uint8)[: len(part)] = part
        places = torch.arange(first // 8, first // 8 + len(words), device=weight.device)
        words = (words ^ (places * ODD[0])) * ODD[1]
        total += ((words ^ (words >> 32)) * ODD[2]).sum()
    return int(total)
