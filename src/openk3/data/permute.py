"""A pseudo-random permutation of 0..n-1 that is computed, not stored.

A balanced Feistel network permutes the smallest power of four that is at least n; values outside
0..n-1 are sent through again until they fall inside (cycle walking, under four passes on average).
Good for shuffling, not for secrets.
"""

from openk3._io import derive_seed
from openk3.errors import InputError

_ROUNDS = 6
_WORD = (1 << 64) - 1


def _mix(value: int) -> int:
    # finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _WORD
    return value ^ (value >> 31)


class Permutation:
    """`Permutation(n, seed)(i)` is where i goes: a bijection of range(n), a pure function."""

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise InputError(f"a permutation needs at least one element, got {size}")
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = [derive_seed(seed, "permutation", r) for r in range(_ROUNDS)]

    def __call__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise InputError(f"index {index} is outside a permutation of {self.size}")
        index = self._encrypt(index)
        while index >= self.size:
            index = self._encrypt(index)
        return index

    def _encrypt(self, value: int) -> int:
        half, mask = self._half, (1 << self._half) - 1
        left, right = value >> half, value & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key & _WORD) & mask)
        return left << half | right
