"""The expert cache: never too many buffers, never a wrong byte, whatever is asked for ahead."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.checkpoint.experts import ExpertCache
from openk3.errors import CheckpointError, InputError


def fill(key, buffer):
    buffer.fill_(key)


def holds(cache):
    return list(cache._slots)


@pytest.fixture
def make():
    made = []

    def cache(num_slots, fill=fill, workers=2):
        made.append(ExpertCache(fill, 16, num_slots, workers=workers))
        return made[-1]

    yield cache
    for one in made:
        one.close()


def use(cache, key):
    with cache.use(key) as buffer:
        assert (buffer == key).all()


def test_least_recently_used_goes_first(make):
    cache = make(3)
    for key in (1, 2, 3, 1, 4):
        use(cache, key)
    assert holds(cache) == [3, 1, 4]
    assert (cache.stats.hits, cache.stats.missed, cache.stats.evictions) == (1, 4, 1)
    assert cache.stats.hit_rate == 1 / 5
    assert cache.stats.bytes_read == 4 * 16


def test_predictions_are_counted_once_and_only_when_used(make):
    cache = make(4)
    cache.ahead([1, 2], predicted=True)
    use(cache, 1)
    use(cache, 1)
    use(cache, 3)
    stats = cache.stats
    assert (stats.predictions, stats.predicted, stats.hits, stats.missed) == (2, 1, 1, 1)


def test_predictions_spare_what_the_layer_still_needs(make):
    cache = make(3)
    for key in (1, 2):
        use(cache, key)
    cache.ahead([7, 8, 9], keep=[1, 2], predicted=True)
    assert holds(cache)[:2] == [1, 2]
    assert len(holds(cache)) == 3


def test_a_buffer_in_use_is_never_given_away(make):
    cache = make(2)
    with cache.use(1) as first, cache.use(2):
        cache.ahead([3, 4])
        assert holds(cache) == [1, 2]
        assert (first == 1).all()


def test_a_user_waits_until_a_buffer_is_free(make):
    cache = make(2)
    reached, done = threading.Event(), threading.Event()

    def third():
        reached.set()
        use(cache, 3)
        done.set()

    with cache.use(1):
        with cache.use(2):
            thread = threading.Thread(target=third)
            thread.start()
            assert reached.wait(10)
            assert not done.is_set()
        assert done.wait(10)
    thread.join()


def test_a_failed_read_is_raised_to_every_user_and_not_kept(make):
    broken = [True]

    def unreliable(key, buffer):
        if broken[0]:
            raise CheckpointError(f"expert {key} is cut short")
        fill(key, buffer)

    cache = make(2, unreliable)
    with pytest.raises(CheckpointError, match="expert 1"):
        use(cache, 1)
    cache.ahead([2])
    with pytest.raises(CheckpointError, match="expert 2"):
        use(cache, 2)
    broken[0] = False
    use(cache, 1)
    use(cache, 2)


def test_a_read_that_breaks_otherwise_keeps_nobody_waiting(make):
    def broken(key, buffer):
        raise MemoryError

    cache = make(2, broken)
    cache.ahead([1])
    with pytest.raises((CheckpointError, MemoryError)):
        use(cache, 1)


def test_two_buffers_are_the_least():
    with pytest.raises(InputError, match="at least 2 experts"):
        ExpertCache(fill, 1 << 20, 1)


keys = st.integers(1, 9)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("use"), keys),
        st.tuples(st.just("ahead"), st.lists(keys, max_size=5), st.lists(keys, max_size=3),
                  st.booleans()),
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(actions, st.integers(2, 5))
def test_any_sequence_keeps_the_laws(actions, num_slots):
    cache = ExpertCache(fill, 16, num_slots, workers=3)
    uses = 0
    for what, *rest in actions:
        if what == "use":
            use(cache, rest[0])
            uses += 1
        else:
            cache.ahead(rest[0], keep=rest[1], predicted=rest[2])
        assert len(holds(cache)) <= num_slots
    cache.close()
    stats = cache.stats
    assert stats.hits + stats.predicted + stats.missed == uses
    assert stats.predicted <= stats.predictions
    assert all(slot.pins == 0 for slot in cache._slots.values())
    assert torch.equal(
        torch.tensor([int(slot.buffer[0]) for slot in cache._slots.values()] or [0]),
        torch.tensor(holds(cache) or [0]),
    )


def test_many_threads_read_right_bytes(make):
    cache = make(3, workers=3)
    errors = []

    def work(seed):
        rng = torch.Generator().manual_seed(seed)
        try:
            for key in torch.randint(1, 10, (200,), generator=rng).tolist():
                cache.ahead([key % 9 + 1], predicted=True)
                use(cache, key)
        except AssertionError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert cache.stats.hits + cache.stats.predicted + cache.stats.missed == 400
