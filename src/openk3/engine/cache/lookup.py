"""What the tiers have of a prompt: the longest chain of latents, then the last state in it."""

from collections.abc import Sequence
from dataclasses import dataclass

from openk3.engine.cache.store import Holding, Kind, Store

Found = tuple[Store, Holding]


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
    chain, pages = _chain(tiers, keys, blocks_per_page)
    chain = min(chain, limit)
    for blocks in range(chain, 0, -1):
        if state := _find(tiers, "state", keys[blocks - 1]):
            return Hit(blocks, chain, tuple(pages[: -(-blocks // blocks_per_page)]), state)
    return Hit(chain=chain)


def _chain(tiers: Sequence[Store], keys: Sequence[bytes], step: int) -> tuple[int, list[Found]]:
    """Blocks in the longest chain of whole pages and the end of one more, and the pages."""
    pages: list[Found] = []
    whole = 0
    while whole + step <= len(keys):
        found = _find(tiers, "latents", keys[whole + step - 1])
        if not found:
            break
        pages.append(found)
        whole += step
    for end in range(min(whole + step - 1, len(keys)), whole, -1):
        if found := _find(tiers, "latents", keys[end - 1]):
            return end, [*pages, found]
    return whole, pages


def _find(tiers: Sequence[Store], kind: Kind, key: bytes) -> Found | None:
    for store in tiers:
        if holding := store.index[kind].get(key):
            return store, holding
    return None
