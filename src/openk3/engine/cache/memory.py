"""Memory of sequences: opened with what the cache has of them, grown, landed, closed."""

from bisect import insort
from typing import TYPE_CHECKING

from openk3.engine.cache.hashing import Chain, media_marks, root_key
from openk3.engine.cache.lookup import Found, Hit, longest
from openk3.engine.cache.remote import Wanted
from openk3.engine.cache.store import Holding, Store
from openk3.engine.cache.tiers import Tiers
from openk3.engine.plan import Checkpoint, Copy, Geometry, Prompt
from openk3.engine.types import Request

if TYPE_CHECKING:
    from openk3.engine.sequence import Sequence


class Memory(Tiers):
    """Who may use which pages of the tiers. See the package's docstring."""

    def __init__(
        self,
        geometry: Geometry,
        hash_block: int,
        *,
        enabled: bool = True,
        num_host_pages: int = 0,
        poison: bool = False,
    ) -> None:
        super().__init__(geometry, hash_block, num_host_pages, poison)
        self.page = geometry.page_tokens
        """Tokens of a latent page."""
        self.enabled = enabled
        self.version = ""

    def pages_for(self, tokens: int) -> int:
        """Latent pages that hold this many positions."""
        return -(-tokens // self.page)

    def chain(self, request: Request, prompt: Prompt) -> Chain:
        """The keys of a request's prompt under the present weights."""
        digests = request.media.digests if request.media else ()
        marks = media_marks(prompt.media, digests, self.block)
        chain = Chain(self.root(request), self.block, marks)
        if self.enabled:
            chain.extend(prompt.ids, len(prompt.ids))
        return chain

    def root(self, request: Request) -> bytes:
        """Where the keys of a request start."""
        return root_key(self.version, request.salt, self.block)

    def rekey(self, seq: "Sequence") -> Chain:
        """The keys of a sequence's known tokens under the present weights."""
        chain = Chain(self.root(seq.request), self.block, seq.chain.media)
        if self.enabled:
            chain.extend(seq.ids, len(seq.ids))
        return chain

    # Lookup

    def lookup(self, seq: "Sequence") -> Hit:
        """The longest prefix of the sequence's known tokens with latents and states."""
        limit = min(len(seq.ids) - 1, seq.skippable) // self.block
        if not self.enabled or limit <= 0:
            return Hit()
        seq.chain.extend(seq.ids, len(seq.ids))
        return longest(self.tiers, seq.chain.keys, limit, self.page // self.block)

    def wanted(self, seq: "Sequence") -> Wanted | None:
        """What an external store might have of a prompt, and the tiers lack."""
        limit = min(len(seq.ids) - 1, seq.skippable) // self.block
        hit, step, keys = self.lookup(seq), self.page // self.block, tuple(seq.chain.keys)
        if not self.enabled or hit.blocks >= limit:
            return None
        blocks = range(hit.blocks + 1, limit + 1)
        here = (b for b in blocks if any(t.find("state", keys[b - 1]) for t in self.tiers))
        one, groups = self.geometry.id_bytes, self.geometry.kda_groups
        return Wanted(
            keys=keys,
            limit=limit,
            whole=hit.chain // step * step,
            hit=hit.blocks,
            states=frozenset(here),
            blocks_per_page=step,
            state_pages=groups,
            room=self.host.num_pages,
            num_bytes={"latents": one, "state": one * groups},
        )

    # A sequence's memory

    def cost(self, seq: "Sequence", hit: Hit) -> int:
        """Free pages that admitting a sequence with this hit takes, until all it knows is in."""
        shared = sum(self._shares(found, i, hit) for i, found in enumerate(hit.latents))
        idle = sum(
            len(holding.pages)
            for store, holding in hit.found
            if store is self.pool and holding.refs == 0
        )
        return self.geometry.kda_groups + self.pages_for(len(seq.ids)) - shared + idle

    def _shares(self, found: Found, index: int, hit: Hit) -> bool:
        """Whether a found page is used as it is: whole, or partial with nobody else in it."""
        store, holding = found
        end = hit.blocks * self.block
        whole = (index + 1) * self.page <= end
        return store is self.pool and (whole or (holding.refs == 0 and holding.end == end))

    def open(self, seq: "Sequence", hit: Hit) -> bool:
        """Give a sequence its state, and what the hit has; False if the pages do not suffice."""
        pool = self.pool
        shares = [self._shares(found, i, hit) for i, found in enumerate(hit.latents)]
        for store, holding in hit.found:
            store.pin(holding)
        if pool.free < self.geometry.kda_groups + len(shares) - sum(shares):
            for store, holding in hit.found:
                store.release(holding)
            return False
        seq.live = pool.take(self.geometry.kda_groups)
        seq.computed = hit.blocks * self.block
        for index, (page, shared) in enumerate(zip(hit.latents, shares, strict=True)):
            seq.latents.append(page[1] if shared else self._copy_in(seq, index, page))
        if hit.state:
            self._restore(seq, *hit.state)
        seq.latent_pages = tuple(holding.pages[0] for holding in seq.latents)
        if hit.chain > hit.blocks and hit.chain * self.block not in seq.marks:
            insort(seq.marks, hit.chain * self.block)
        return True

    def _copy_in(self, seq: "Sequence", index: int, found: Found) -> Holding:
        """A page of the sequence's own with what a shared or a host page holds."""
        store, source = found
        mine = Holding("latents", self.pool.take(1))
        self.copies.append(Copy(source.pages[0], mine.pages[0], store.tier))
        self._pins.append(found)
        if store is self.host:
            first = index * self.page // self.block
            last = min(first + self.page // self.block, seq.computed // self.block)
            keys = [(seq.chain.keys[b], (b + 1) * self.block) for b in range(first, last)]
            self.pool.pin(mine)
            self._arrivals.append((self.pool, mine, keys))
            self.host_hits += 1
        return mine

    def _restore(self, seq: "Sequence", store: Store, state: Holding) -> None:
        assert state.end == seq.computed, f"{state} is not the state at {seq.computed}"
        for source, target in zip(state.pages, seq.live, strict=True):
            self.copies.append(Copy(source, target, store.tier))
        self._pins.append((store, state))
        state.keep = True
        if store is self.host:
            self.host_hits += len(state.pages)
        else:
            seq.kept.append(state)

    def grow(self, seq: "Sequence", end: int) -> bool:
        """Latent pages up to position `end`; False, and nothing changed, if there are too few."""
        need = self.pages_for(end) - len(seq.latents)
        if need <= 0:
            return True
        if self.pool.free < need:
            return False
        pages = self.pool.take(need)
        seq.latents.extend(Holding("latents", (page,)) for page in pages)
        seq.latent_pages += pages
        return True

    def checkpoints(self, seq: "Sequence", start: int, end: int) -> tuple[Checkpoint, ...]:
        """States to leave behind by a pass from `start` to `end` (without drafts), as far as pages
        allow. The last token before `end` may be unknown yet."""
        last = end // self.block * self.block
        if not self.enabled or last <= start:
            return ()
        seq.chain.extend(seq.ids, min(end, len(seq.ids)))
        marks = seq.marks_within(start, end)
        for position in marks if last in marks else [*marks, last]:
            keys = seq.chain.keys[position // self.block - 1 :][:1]
            known = self.pool.find("state", keys[0]) if keys else None
            if known and position in marks:
                known.keep = True
                seq.kept.append(known)
            elif not known and self.pool.free >= self.geometry.kda_groups:
                state = Holding("state", self.pool.take(self.geometry.kda_groups), position)
                state.keep = position in marks
                seq.pending.append(state)
        return tuple(Checkpoint(x.end, x.pages) for x in seq.pending if x.end > start)

    def land_pass(self, seq: "Sequence", computed: int) -> None:
        """A sequence has been computed up to here; register its blocks and checkpoints."""
        before, seq.computed = seq.computed, computed
        first, last = before // self.block, computed // self.block
        if not self.enabled or first == last:
            return
        seq.chain.extend(seq.ids, computed)
        keys = seq.chain.keys
        for block in range(first, last):
            page = seq.latents[block * self.block // self.page]
            self.pool.register(page, keys[block], (block + 1) * self.block)
        newest = None
        landed = [state for state in seq.pending if state.end <= computed]
        seq.pending = seq.pending[len(landed) :]
        for state in landed:
            assert before < state.end, f"{state} by a pass {before} .. {computed}"
            self.pool.register(state, keys[state.end // self.block - 1], state.end)
            if state.keep:
                seq.kept.append(state)
            else:
                newest = state
            self.pool.release(state)
        if newest or self.pool.find("state", keys[last - 1]):
            self._recycle(seq.inflight)
            seq.inflight = newest

    def _recycle(self, state: Holding | None) -> None:
        if state and state.keys and not state.keep and state.refs == 0:
            self.pool.forget(state)

    def close(self, seq: "Sequence") -> None:
        """Give back all that a sequence holds. What is findable stays so, its tail goes first."""
        last = seq.computed // self.block
        if self.enabled and last and (state := self.pool.find("state", seq.chain.keys[last - 1])):
            state.keep = True
            seq.kept.append(state)
        for state in seq.pending:
            self.pool.release(state)
        self.pool.give(seq.live)
        order = [(index * self.page, page) for index, page in enumerate(seq.latents)]
        order += [(state.end, state) for state in seq.kept]
        for _, holding in sorted(order, key=lambda item: item[0], reverse=True):
            if holding.kind == "state":
                self.pool.touch(holding)
            else:
                self.pool.release(holding)
        seq.close()

    def spoil(self, seq: "Sequence") -> None:
        """The bytes of a sequence cannot be trusted: nothing is to find any of them."""
        for key in seq.chain.keys:
            self.lose("latents", key)
            self.lose("state", key)

    def new_weights(self, version: str) -> None:
        """Nothing of other weights can be found; no sequence may be open."""
        self.version = version
        self.clear()
