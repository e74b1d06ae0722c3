"""Chained keys of hash blocks: a key names everything before the end of its block."""

import hashlib
import struct
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


def root_key(version: str, salt: str, hash_block: int) -> bytes:
    """What separates caches: weights, tenant or adapter, and the size of a block."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"openk3 prefix")
    for part in (version.encode(), salt.encode()):
        hasher.update(struct.pack("<Q", len(part)) + part)
    hasher.update(struct.pack("<Q", hash_block))
    return hasher.digest()


def media_marks(
    spans: Sequence[tuple[int, int]], digests: Sequence[bytes], hash_block: int
) -> dict[int, bytes]:
    """Block index -> what its pictures add to its key: where each begins, and its digest."""
    marks: dict[int, bytes] = {}
    for (start, length), digest in zip(spans, digests, strict=True):
        for block in range(start // hash_block, (start + length - 1) // hash_block + 1):
            place = struct.pack("<qqQ", start - block * hash_block, length, len(digest))
            marks[block] = marks.get(block, b"") + place + digest
    return marks


class Chain:
    """The keys of one sequence's complete blocks, grown as its tokens become known."""

    __slots__ = ("block", "keys", "media", "root")

    def __init__(self, root: bytes, hash_block: int, media: dict[int, bytes] | None = None) -> None:
        self.root = root
        self.block = hash_block
        """Tokens of a block."""
        self.media = media or {}
        self.keys: list[bytes] = []

    def extend(self, ids: Sequence[int], end: int) -> None:
        """Hash the blocks that are complete within ids[:end]."""
        keys, size = self.keys, self.block
        key = keys[-1] if keys else self.root
        for block in range(len(keys), end // size):
            hasher = hashlib.blake2b(key, digest_size=DIGEST_BYTES)
            hasher.update(array("I", ids[block * size : (block + 1) * size]))
            if extra := self.media.get(block):
                hasher.update(extra)
            key = hasher.digest()
            keys.append(key)
