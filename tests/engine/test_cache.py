"""Keys and stores by themselves, and what `check` is to see."""

import pytest

from engine_driver import Driver, H, P, random_ids
from openk3.engine.cache.checks import check
from openk3.engine.cache.hashing import Chain, media_marks, root_key
from openk3.engine.cache.store import Holding, Store
from openk3.engine.drafts import LOOKBACK, Grams


def keys_of(ids, version="", salt="", block=4, media=None) -> list[bytes]:
    chain = Chain(root_key(version, salt, block), block, media)
    chain.extend(ids, len(ids))
    return chain.keys


def test_a_key_names_its_whole_prefix():
    ids = list(range(12))
    keys = keys_of(ids)
    assert len(keys) == 3
    for at in range(12):
        other = keys_of([*ids[:at], 99, *ids[at + 1 :]])
        same = [a == b for a, b in zip(keys, other, strict=True)]
        assert same == [block < at // 4 for block in range(3)]


def test_keys_grow_as_they_would_be_at_once():
    chain = Chain(root_key("", "", 4), 4)
    ids = list(range(30))
    for end in (3, 4, 5, 11, 12, 30):
        chain.extend(ids, end)
    assert chain.keys == keys_of(ids)


def test_what_separates_caches():
    ids = list(range(8))
    media = media_marks([(2, 3)], [b"a"], 4)
    others = [
        keys_of(ids, version="1"),
        keys_of(ids, salt="1"),
        keys_of(ids, media=media),
        keys_of(ids, media=media_marks([(2, 3)], [b"b"], 4)),
        keys_of(ids, media=media_marks([(1, 3)], [b"a"], 4)),
        keys_of(ids, media=media_marks([(2, 2), (4, 1)], [b"a", b"a"], 4)),
        keys_of(ids),
    ]
    assert len({keys[0] for keys in others}) == len(others)
    assert sorted(media) == [0, 1]
    assert root_key("a", "b", 4) != root_key("ab", "", 4) != root_key("", "ab", 4)


def test_the_least_recently_used_goes_first():
    store = Store("pool", 4)
    held = [Holding("latents", store.take(1)) for _ in range(4)]
    for n, holding in enumerate(held):
        store.register(holding, bytes([n]), 4)
        store.release(holding)
    store.pin(held[0])
    store.touch(held[1])
    assert store.free == 3
    assert store.take(2) == (held[3].pages[0], held[2].pages[0])
    assert [store.find("latents", bytes([n])) for n in range(4)] == [held[0], held[1], None, None]
    store.release(held[0])
    assert store.take(1) == held[1].pages


def test_a_checkpoint_goes_in_all_groups_at_once():
    store = Store("pool", 5)
    state = Holding("state", store.take(3), 8)
    store.register(state, b"k", 8)
    store.release(state)
    assert store.free == 5
    store.take(3)
    assert store.find("state", b"k") is None
    assert store.free == len(store.blank) == 2


def test_pages_asked_beyond_what_is_free():
    store = Store("pool", 2)
    store.take(2)
    with pytest.raises(AssertionError, match="1 pages asked of 0"):
        store.take(1)


def running_driver() -> Driver:
    driver = Driver()
    driver.run(random_ids(2 * P))
    driver.add(random_ids(3 * P), 50)
    driver.add(random_ids(30, seed=1), 50)
    for _ in range(3):
        driver.step()
    return driver


def lose_a_page(memory, running):
    memory.pool.blank.pop()


def give_a_page_twice(memory, running):
    memory.pool.blank.append(running[0].live[0])


def miscount(memory, running):
    running[0].latents[0].refs += 1


def write_in_a_shared_page(memory, running):
    running[0].latents[-1].refs += 1
    running[1].latents.append(running[0].latents[-1])
    running[1].latent_pages = tuple(page.pages[0] for page in running[1].latents)


def change_a_token(memory, running):
    running[0].ids[3] ^= 1


def half_a_checkpoint(memory, running):
    state = next(iter(memory.pool.index["state"].values()))
    memory.pool.blank.append(state.pages[0])
    state.pages = state.pages[1:]
    memory.pool.idle_pages -= 1


def share_a_slot(memory, running):
    running[0].slot = running[1].slot


@pytest.mark.parametrize(
    "harm",
    [
        lose_a_page,
        give_a_page_twice,
        miscount,
        write_in_a_shared_page,
        change_a_token,
        half_a_checkpoint,
        share_a_slot,
    ],
)
def test_check_sees(harm):
    driver = running_driver()
    scheduler, memory = driver.engine.scheduler, driver.engine.memory
    check(scheduler, memory)
    harm(memory, scheduler.running)
    with pytest.raises(AssertionError):
        check(scheduler, memory)


def test_pages_are_poisoned_when_they_become_blank():
    driver = Driver(num_pages=20)
    driver.run(random_ids(2 * H + 3))
    assert sorted(driver.runner.plans[0].poison) == list(range(20))
    held = set(driver.runner.plans[0].chunks[0].state_pages)
    driver.run(random_ids(5, seed=1))
    assert held <= set(driver.runner.plans[1].poison)


def test_a_repetition_is_continued():
    grams = Grams()
    assert grams.guess([1, 2, 3], 4) == ()
    ids = [1, 2, 3, 4, 5, 9, 2, 3]
    assert grams.guess(ids, 3) == (4, 5, 9)
    ids += [4, 6, 1, 2, 3, 4]
    assert grams.guess(ids, 2) == (5, 9)
    assert grams.guess([*ids, 6, 1], 9) == (2, 3, 4, 6, 1)


def test_only_the_end_of_a_long_prompt_is_searched():
    grams = Grams()
    ids = [7, 8, 1, *range(10, 10 + LOOKBACK), 7, 8]
    assert grams.guess(ids, 3) == ()
