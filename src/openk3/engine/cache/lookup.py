"""What the tiers have of a prompt: the longest chain of latents, then the last state in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from openk3.engine.cache.store import Holding, Kind, Store

Found = tuple[Store, Holding]
T = TypeVar("T")


@dataclass(frozen=True)
class Hit:
    """What the cache has of a prompt. The first `blocks` blocks can be skipped."""

    blocks: int = 0
    chain: int = 0
    """Blocks whose latents are known; more than `blocks` where the state is missing."""
    latents: tuple[Found, ...] = ()
    """Pages of positions 0 .. blocks * hash_block - 1."""
    state: Found | None = None

    @property
    def found(self) -> tuple[Found, ...]:
        """All that has to be pinned."""
        return (*self.latents, self.state) if self.state else self.latents


def longest(tiers: Sequence[Store], keys: Sequence[bytes], limit: int, blocks_per_page: int) -> Hit:
    """The longest hit of at most `limit` blocks among the keys of a prompt's complete blocks."""
    pages = walk(lambda end: _find(tiers, "latents", keys[end - 1]), 0, len(keys), blocks_per_page)
    chain = min(pages[-1][0], limit) if pages else 0
    for blocks in range(chain, 0, -1):
        if state := _find(tiers, "state", keys[blocks - 1]):
            used = pages[: -(-blocks // blocks_per_page)]
            return Hit(blocks, chain, tuple(page for _, page in used), state)
    return Hit(chain=chain)


def walk(
    find: Callable[[int], T | None], start: int, limit: int, blocks_per_page: int
) -> list[tuple[int, T]]:
    """The longest chain of pages behind block `start`: (block that it ends with, what `find` has).

    All are whole but the last, which may be the longest known part of one."""
    pages: list[tuple[int, T]] = []
    while start + blocks_per_page <= limit and (page := find(start + blocks_per_page)):
        start += blocks_per_page
        pages.append((start, page))
    for end in range(min(start + blocks_per_page - 1, limit), start, -1):
        if page := find(end):
            return [*pages, (end, page)]
    return pages


def _find(tiers: Sequence[Store], kind: Kind, key: bytes) -> Found | None:
    for store in tiers:
        if holding := store.index[kind].get(key):
            return store, holding
    return None
