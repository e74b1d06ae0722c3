"""The tiers of pages: what moves between them, and is findable once it has."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from openk3.engine.cache.lookup import Found
from openk3.engine.cache.remote import Piece, Wanted
from openk3.engine.cache.store import Holding, Kind, Store
from openk3.engine.plan import Copy, Geometry

if TYPE_CHECKING:
    from openk3.engine.external import External


class Tiers:
    """The pool, the host tier behind it, and an external store behind that."""

    def __init__(
        self, geometry: Geometry, hash_block: int, num_host_pages: int, poison: bool
    ) -> None:
        self.geometry = geometry
        self.block = hash_block
        """Tokens of a hash block."""
        self.pool = Store("pool", geometry.num_pages, self._write_back)
        self.host = Store("host", num_host_pages, self._put_away)
        self.external: External | None = None
        self.tiers = (self.pool, self.host) if num_host_pages else (self.pool,)
        if poison:
            self.pool.blanked = list(range(geometry.num_pages))
        self.copies: list[Copy] = []
        """Of the plan being made, in order."""
        self.host_hits = 0
        self._pins: list[Found] = []
        """What the copies read."""
        self._arrivals: list[tuple[Store, Holding, list[tuple[bytes, int]]]] = []
        """What they write, and the keys (with their ends) that will lead there."""

    def take_copies(self) -> tuple[tuple[Copy, ...], tuple[int, ...]]:
        """(copies, pages to poison) of the plan that has been made. Poison comes first in a plan,
        so it spares what the copies read."""
        copies = tuple(self.copies)
        self.copies.clear()
        if not self.pool.blanked:
            return copies, ()
        read = {copy.source for copy in copies if copy.source_tier == "pool"}
        poison = tuple(page for page in self.pool.blanked if page not in read)
        self.pool.blanked.clear()
        return copies, poison

    def land_copies(self) -> None:
        """The plan's copies have been made: what they brought is findable from now on."""
        for store, holding, keys in self._arrivals:
            for key, end in keys:
                store.register(holding, key, end)
        self._release_copies()

    def _release_copies(self) -> None:
        for store, holding in (*(arrival[:2] for arrival in self._arrivals), *self._pins):
            store.release(holding)
        self._arrivals.clear()
        self._pins.clear()

    def _put_away(self, holding: Holding) -> None:
        """The host tier evicts."""
        if self.external:
            self.external.put(holding.kind, holding.keys[-1], holding.pages)

    def _write_back(self, holding: Holding) -> None:
        """The pool evicts: keep a copy in host memory, unless one is there."""
        host = self.host
        if not host.num_pages:
            return
        if known := host.find(holding.kind, holding.keys[-1]):
            host.touch(known)
            return
        if host.free < len(holding.pages):
            return
        if smaller := host.find(holding.kind, holding.keys[0]):
            host.forget(smaller)
        away = Holding(holding.kind, host.take(len(holding.pages)), holding.end)
        for source, target in zip(holding.pages, away.pages, strict=True):
            self.copies.append(Copy(source, target, "pool", "host"))
        self._arrivals.append((host, away, [(key, holding.end) for key in holding.keys]))

    def lose(self, kind: Kind, key: bytes) -> bool:
        """Forget what is found under a key, in every tier. Whether there was anything."""
        found = [(store, store.find(kind, key)) for store in self.tiers]
        for store, holding in found:
            if holding:
                store.forget(holding)
        return any(holding for _, holding in found)

    def clear(self) -> None:
        """Forget what could be reused."""
        self.pool.clear()
        self.host.clear()

    def reset_after_failure(self) -> None:
        """A step broke off: no byte of this plan can be trusted, nor any that it might have hit."""
        self.copies.clear()
        self._release_copies()
        self.clear()

    def bring(
        self, wanted: Wanted, pieces: Sequence[Piece], write: Callable[[Sequence[int], bytes], None]
    ) -> int:
        """Take fetched pieces into the host tier; `write` fills host pages. How many pages."""
        brought = 0
        for piece in pieces:
            key, end = wanted.keys[piece.block - 1], piece.block * self.block
            count = self.geometry.kda_groups if piece.kind == "state" else 1
            if self.host.find(piece.kind, key) or self.host.free < count:
                continue
            mine = Holding(piece.kind, self.host.take(count), end)
            write(mine.pages, piece.data)
            first = piece.block - 1
            if piece.kind == "latents":
                first = first // wanted.blocks_per_page * wanted.blocks_per_page
            for block in range(first, piece.block):
                self.host.register(mine, wanted.keys[block], (block + 1) * self.block)
            self.host.release(mine)
            brought += count
        return brought
