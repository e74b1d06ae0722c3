"""Every invariant of the memory, checked between two steps (debug mode and tests)."""

from collections import Counter
from typing import TYPE_CHECKING

from openk3.engine.cache.memory import Memory
from openk3.engine.cache.store import Store

if TYPE_CHECKING:
    from openk3.engine.scheduler import Scheduler


def check(scheduler: "Scheduler", memory: Memory) -> None:
    """AssertionError, with what is wrong, unless all holds that the package's docstring says."""
    _check_owners(scheduler, memory)
    for store in memory.tiers:
        _check_index(store, memory)
    _check_sequences(scheduler, memory)
    _check_keys(scheduler, memory)


def _check_owners(scheduler: "Scheduler", memory: Memory) -> None:
    """Each page has one owner, and is held as often as sequences need it."""
    pool = memory.pool
    owners = Counter(pool.blank)
    for holding in pool.idle:
        owners.update(holding.pages)
    held: Counter = Counter()
    for seq in scheduler.running:
        owners.update(seq.live)
        held.update(seq.latents)
        for state in seq.pending:
            assert state.end > seq.computed, f"{seq.request.id} has a {state} that did not land"
            owners.update(state.pages)
    for holding in held:
        owners.update(holding.pages)
    wrong = {page: n for page, n in owners.items() if n != 1}
    assert not wrong, f"pages with several owners: {wrong}"
    assert len(owners) == pool.num_pages, f"{pool.num_pages - len(owners)} pages are lost"
    for holding, count in held.items():
        assert holding.refs == count, f"{holding} is held by {count} sequences"
    host = memory.host
    pages = Counter(host.blank)
    for holding in host.idle:
        pages.update(holding.pages)
    assert pages == Counter(range(host.num_pages)), "host pages are lost or have several owners"
    assert not memory.copies, "copies are left over from a plan"


def _check_index(store: Store, memory: Memory) -> None:
    """What is findable is idle or held, under each of its keys, whole and at its position."""
    assert store.idle_pages == sum(len(holding.pages) for holding in store.idle)
    for kind, index in store.index.items():
        for key, holding in index.items():
            assert holding.kind == kind, f"{holding} is found as {kind}"
            assert key in holding.keys, f"{holding} does not know a key that leads to it"
            assert (holding.refs == 0) == (holding in store.idle), f"{holding} is lost"
            assert holding.end % memory.block == 0, f"{holding} does not end with a block"
            if kind == "state":
                assert len(holding.pages) == memory.geometry.kda_groups, f"{holding} is partial"
                assert len(holding.keys) == 1, f"{holding} stands for several positions"
    for holding in store.idle:
        assert holding.refs == 0, f"idle {holding}"
        assert holding.keys, f"{holding} is idle, and nothing finds it"
        for key in holding.keys:
            assert store.index[holding.kind].get(key) is holding, f"{holding} is not found"


def _check_sequences(scheduler: "Scheduler", memory: Memory) -> None:
    """A slot, a state and the pages it has computed for each running one; nothing for others."""
    slots = [seq.slot for seq in scheduler.running] + scheduler.slots
    assert sorted(slots) == list(range(scheduler.config.max_running)), "slots are lost or shared"
    for seq in scheduler.running:
        assert len(seq.live) == memory.geometry.kda_groups, f"{seq.request.id} has no state"
        assert len(seq.latents) >= memory.pages_for(seq.computed), f"{seq.request.id} lacks pages"
        assert seq.latent_pages == tuple(page.pages[0] for page in seq.latents)
        for index, page in enumerate(seq.latents):
            alone = page.refs == 1 and page.end <= seq.computed
            whole = (index + 1) * memory.page <= seq.computed
            assert whole or alone, f"{seq.request.id} writes in {page}, which others can find"
    for seq in scheduler.waiting:
        holds = bool(seq.latents or seq.live or seq.slot >= 0)
        assert not holds, f"{seq.request.id} waits and holds memory"
    for queue in (scheduler.running, scheduler.waiting):
        ranks = [seq.rank for seq in queue]
        assert ranks == sorted(set(ranks)), "a queue is out of order"


def _check_keys(scheduler: "Scheduler", memory: Memory) -> None:
    """Keys computed anew from the tokens are those that were kept."""
    for seq in (*scheduler.running, *scheduler.waiting):
        fresh = memory.rekey(seq).keys[: len(seq.chain.keys)]
        assert fresh == seq.chain.keys, f"{seq.request.id} has keys of other tokens"
