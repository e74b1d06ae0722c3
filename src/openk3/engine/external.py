"""The engine's side of a store behind the host tier: what the host evicts is put there, and
fetched back into the host tier before a prompt that begins with it is admitted.

Pages go by the keys of the prefix cache (`cache.hashing`), latents and states alike, under a name
that separates models and weights. Everything that may wait (puts and fetches) happens on threads of
its own; a request waits for its fetch and for nobody else's. Bounds: puts beyond MAX_PUTS under way
are dropped, a fetch takes no more than the host tier has room for.
"""

import concurrent.futures as futures
import hashlib
import logging
from collections.abc import Callable, Sequence

from openk3.engine.cache.lookup import walk
from openk3.engine.cache.remote import Piece, Wanted
from openk3.engine.cache.store import Kind
from openk3.engine.stores import KeyValueStore
from openk3.errors import BackendError

log = logging.getLogger(__name__)

MAX_PUTS = 64
"""Under way at once; those beyond are dropped."""
SEAL_BYTES = 16


def sealed(key: str, data: bytes) -> bytes:
    """The data, and a digest of it and of its key: bytes that changed, or moved, are found out."""
    return data + _seal(key, data)


def opened(key: str, value: bytes, num_bytes: int) -> bytes | None:
    """The data that was sealed; None if it is not that, or has another length."""
    data = value[:num_bytes]
    return data if value[num_bytes:] == _seal(key, data) and len(data) == num_bytes else None


def _seal(key: str, data: bytes) -> bytes:
    hasher = hashlib.blake2b(key.encode(), digest_size=SEAL_BYTES)
    hasher.update(data)
    return hasher.digest()


class External:
    """The engine's side of a store. `read` gives the bytes of host pages."""

    def __init__(
        self,
        store: KeyValueStore,
        name: str,
        read: Callable[[Sequence[int]], bytes],
    ) -> None:
        self.store, self.name, self.read = store, name, read
        self.threads = futures.ThreadPoolExecutor(2, "external-store")
        self.generation = 0
        """Rises when all that was put is to be forgotten."""
        self.failure: str | None = None
        """Why the store is not used any more."""
        self.puts = self.fetched = 0
        """Pages put and brought back."""
        self._under_way: set[futures.Future[None]] = set()
        self._damaged: set[str] = set()
        """Keys whose values are to be put anew."""

    def close(self) -> None:
        """Wait for what is under way."""
        self.threads.shutdown()

    def _key(self, kind: Kind, key: bytes) -> str:
        return f"{self.name}-{self.generation}-{kind}-{key.hex()}"

    def put(self, kind: Kind, key: bytes, pages: Sequence[int]) -> None:
        """Keep what these host pages hold, some time soon."""
        self._under_way = {put for put in self._under_way if not put.done()}
        if self.failure is None and len(self._under_way) < MAX_PUTS:
            self.puts += len(pages)
            self._under_way.add(
                self.threads.submit(self._put, self._key(kind, key), self.read(pages))
            )

    def _put(self, key: str, data: bytes) -> None:
        try:
            if key in self._damaged or not self.store.is_exist(key):
                self.store.put(key, sealed(key, data))
                self._damaged.discard(key)
        except (OSError, BackendError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        log.warning("the external store is not used any more: %s", self.failure)

    def fetch(self, ask: Wanted) -> futures.Future[list[Piece]]:
        """Start to bring what makes a prompt's hit longer; nothing, or all that it takes."""
        return self.threads.submit(self._fetch, ask)

    def _fetch(self, ask: Wanted) -> list[Piece]:
        if self.failure is not None:
            return []
        try:
            return self._pieces(ask)
        except (OSError, BackendError) as error:
            self._fail(error)
            return []

    def _has(self, kind: Kind, key: bytes) -> bool:
        name = self._key(kind, key)
        return name not in self._damaged and self.store.is_exist(name)

    def _get(self, kind: Kind, key: bytes, num_bytes: int) -> bytes | None:
        """What was put; None for what has gone, was cut, or is not what was put."""
        name = self._key(kind, key)
        if (value := self.store.get(name)) is None:
            return None
        data = opened(name, value, num_bytes)
        if data is None:
            log.warning("%s in the external store is damaged; it is put there anew", name)
            self._damaged.add(name)
        return data

    def _pieces(self, ask: Wanted) -> list[Piece]:
        """The pages up to the last block with a state, and that state unless it is here."""
        keys = ask.keys
        found = walk(
            lambda end: self._has("latents", keys[end - 1]),
            ask.whole,
            ask.limit,
            ask.blocks_per_page,
        )
        pages = [end for end, _ in found]
        chain = pages[-1] if pages else ask.whole
        hits = range(chain, ask.hit, -1)
        hit = next((b for b in hits if b in ask.states or self._has("state", keys[b - 1])), None)
        if hit is None:
            return []
        pages = [end for i, end in enumerate(pages) if i == 0 or pages[i - 1] < hit]
        wanted: list[tuple[Kind, int]] = [("latents", end) for end in pages]
        if hit not in ask.states:
            wanted.append(("state", hit))
        if len(pages) + (hit not in ask.states) * ask.state_pages > ask.room:
            return []
        pieces = []
        for kind, end in wanted:
            data = self._get(kind, keys[end - 1], ask.num_bytes[kind])
            if data is None:
                return []
            pieces.append(Piece(kind, end, data))
        return pieces
