"""The scripted runner sees each fault of a cache that it is there to see."""

import pytest

from engine_driver import Driver, H, P, random_ids, serve_random
from openk3.engine.cache.memory import Memory
from openk3.engine.cache.store import Store
from openk3.engine.scheduler import Scheduler
from openk3.engine.scripted import WrongMemoryError


def shares_partial_pages(patch):
    patch.setattr(Memory, "_shares", lambda self, found, index, hit: found[0] is self.pool)


def takes_what_is_held(patch):
    def take(self, count):
        while len(self.blank) < count:
            victim = next(iter(self.idle), None)
            if victim is None:
                victim = next(iter(self.index["latents"].values()))
                self.blank.extend(victim.pages)
                self.forget(victim)
            else:
                self.evict(victim)
        return tuple(self.blank.pop() for _ in range(count))

    patch.setattr(Store, "take", take)
    patch.setattr(Store, "free", property(lambda self: self.num_pages))


def evicts_one_group_of_a_checkpoint(patch):
    evict = Store.evict
    halved = set()

    def half(self, holding):
        if holding.kind == "state" and holding not in halved:
            halved.add(holding)
            self.blank.append(holding.pages[0])
            self.idle.move_to_end(holding)
        else:
            evict(self, holding)

    patch.setattr(Store, "evict", half)


def runs_in_the_checkpoint(patch):
    def restore(self, seq, store, state):
        seq.live = state.pages

    patch.setattr(Memory, "_restore", restore)


def ignores_salts(patch):
    patch.setattr(Memory, "root", lambda self, request: b"")


def keeps_old_weights(patch):
    patch.setattr(Memory, "new_weights", lambda self, version: None)


def resumes_where_it_was(patch):
    drop = Scheduler.drop

    def forgetful(self, seq):
        computed = seq.computed
        drop(self, seq)
        seq.computed = computed

    patch.setattr(Scheduler, "drop", forgetful)
    patch.setattr(Memory, "open", _open_without_reset)


def _open_without_reset(self, seq, hit):
    if self.pool.free < self.geometry.kda_groups + self.pages_for(seq.computed):
        return False
    seq.live = self.pool.take(self.geometry.kda_groups)
    self.grow(seq, seq.computed)
    return True


def does_not_forget_slots(patch):
    from openk3.engine.scripted import ScriptedRunner

    patch.setattr(ScriptedRunner, "forget", lambda self, slot: None)


FAULTS = [
    shares_partial_pages,
    takes_what_is_held,
    evicts_one_group_of_a_checkpoint,
    runs_in_the_checkpoint,
    ignores_salts,
    keeps_old_weights,
    resumes_where_it_was,
    does_not_forget_slots,
]


def serve_much() -> None:
    for seed in range(5):
        serve_random(seed, 60, debug=False, num_pages=60 - 10 * seed)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_is_seen(fault, monkeypatch):
    fault(monkeypatch)
    monkeypatch.setattr("engine_driver.check", lambda scheduler, memory: None)
    with pytest.raises(WrongMemoryError):
        serve_much()


def test_a_lost_copy_is_seen(monkeypatch):
    monkeypatch.setattr(Memory, "_restore", lambda self, seq, store, state: None)
    driver = Driver()
    driver.run(random_ids(P))
    with pytest.raises(WrongMemoryError, match="state"):
        driver.run(random_ids(2 * P))


def test_a_checkpoint_of_another_position_is_not_restored():
    driver = Driver()
    driver.run(random_ids(P))
    for state in driver.engine.memory.pool.index["state"].values():
        state.end -= H
    with pytest.raises(AssertionError, match="is not the state at"):
        driver.run(random_ids(2 * P))
