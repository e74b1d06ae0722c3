"""One tier of pages: who owns each, which of them can be found again, which goes first."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal

from openk3.engine.plan import Tier

Kind = Literal["latents", "state"]


class Holding:
    """Pages under one reference count: a latent page, or a checkpoint (a page of each group)."""

    __slots__ = ("end", "keep", "keys", "kind", "pages", "refs")

    def __init__(self, kind: Kind, pages: tuple[int, ...], end: int = 0) -> None:
        self.kind: Kind = kind
        self.pages = pages
        self.end = end
        """Token position: of the state, or behind the last registered block of the page."""
        self.refs = 1
        """Of the one who made it, and of each that pinned it since."""
        self.keys: list[bytes] = []
        self.keep = False
        """A checkpoint that is not recycled when the next one lands."""

    def __repr__(self) -> str:
        return f"Holding({self.kind} {self.pages} end={self.end} refs={self.refs})"


class Store:
    """Blank pages, idle holdings in order of use, and the index of findable ones.

    `on_evict` sees a holding before it is forgotten."""

    def __init__(
        self,
        tier: Tier,
        num_pages: int,
        on_evict: Callable[[Holding], None] = lambda holding: None,
    ) -> None:
        self.tier: Tier = tier
        self.num_pages = num_pages
        self.blank = list(range(num_pages - 1, -1, -1))
        self.idle: OrderedDict[Holding, None] = OrderedDict()
        self.idle_pages = 0
        self.index: dict[Kind, dict[bytes, Holding]] = {"latents": {}, "state": {}}
        self.on_evict = on_evict
        self.blanked: list[int] | None = None
        """Pages that became blank since it was last emptied; None records nothing."""

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self.blank) + self.idle_pages

    def take(self, count: int) -> tuple[int, ...]:
        """`count` pages to be owned by the caller; the least recently used holdings go."""
        assert self.free >= count, f"{count} pages asked of {self.free} free ones"
        while len(self.blank) < count:
            self.evict(next(iter(self.idle)))
        if count == 0:
            return ()
        taken = tuple(self.blank[: -count - 1 : -1])
        del self.blank[-count:]
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Pages whose content nobody will look for any more."""
        self.blank.extend(pages)
        if self.blanked is not None:
            self.blanked.extend(pages)

    def pin(self, holding: Holding) -> None:
        """Hold it: it cannot be evicted until it is released as often as it was pinned."""
        if holding.refs == 0:
            del self.idle[holding]
            self.idle_pages -= len(holding.pages)
        holding.refs += 1

    def release(self, holding: Holding) -> None:
        """The opposite of `pin`; the last one leaves it idle, or blank if nothing finds it."""
        assert holding.refs > 0, f"{holding} is released more often than pinned"
        holding.refs -= 1
        if holding.refs:
            return
        if holding.keys:
            self.idle[holding] = None
            self.idle_pages += len(holding.pages)
        else:
            self.give(holding.pages)

    def touch(self, holding: Holding) -> None:
        """Used just now."""
        if holding.refs == 0 and holding.keys:
            self.idle.move_to_end(holding)

    def register(self, holding: Holding, key: bytes, end: int) -> None:
        """Make it findable under `key`, unless that leads somewhere already."""
        index = self.index[holding.kind]
        if key not in index:
            index[key] = holding
            holding.keys.append(key)
            holding.end = end

    def find(self, kind: Kind, key: bytes) -> Holding | None:
        return self.index[kind].get(key)

    def forget(self, holding: Holding) -> None:
        """Nothing finds it any more; if idle, its pages are blank from now on."""
        if not holding.keys:
            return
        index = self.index[holding.kind]
        for key in holding.keys:
            del index[key]
        holding.keys.clear()
        if holding.refs == 0:
            del self.idle[holding]
            self.idle_pages -= len(holding.pages)
            self.give(holding.pages)

    def evict(self, holding: Holding) -> None:
        """Give up an idle holding, in all its groups at once."""
        self.on_evict(holding)
        self.forget(holding)

    def clear(self) -> None:
        """Forget everything; what is held stays held, and is not findable."""
        for index in self.index.values():
            for holding in list(index.values()):
                self.forget(holding)
