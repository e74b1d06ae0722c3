"""Any order of adds, steps, aborts, losses, new weights and failures, against naive models.

`OPENK3_ENGINE_EXAMPLES=2000` runs a longer profile.
"""

import os
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine_driver import NEVER, PAGE_BYTES, AtOnce, Dictionary, Driver, random_ids
from openk3.engine.cache.checks import check
from openk3.engine.scripted import from_prefix
from openk3.engine.types import Media
from openk3.errors import InputError

EXAMPLES = int(os.environ.get("OPENK3_ENGINE_EXAMPLES", "60"))
BASES = [random_ids(70, seed=n) for n in range(3)]


class BrokenRunError(Exception):
    """The runner breaks off."""


class EngineMachine(RuleBasedStateMachine):
    """The scripted runner is the model: a page that holds anything but the chunk's own prefix, an
    id that the script does not give, a lost page or slot is a failure."""

    @initialize(
        block=st.sampled_from([1, 2, 4, 5]),
        pages_of=st.integers(1, 4),
        groups=st.integers(0, 3),
        num_pages=st.integers(8, 60),
        budget=st.sampled_from([1, 2, 5, 16, 33, 200]),
        max_running=st.sampled_from([1, 2, 5]),
        drafts=st.sampled_from([0, 0, 2, 5]),
        host=st.sampled_from([0, 4, 30]),
        cache=st.sampled_from([True, True, True, False]),
        overlap=st.booleans(),
        source=st.sampled_from(["ngram", "mtp"]),
        external=st.booleans(),
    )
    def start(
        self,
        block,
        pages_of,
        groups,
        num_pages,
        budget,
        max_running,
        drafts,
        host,
        cache,
        overlap,
        source,
        external,
    ) -> None:
        self.driver = Driver(
            num_pages=num_pages,
            kda_groups=groups,
            page_tokens=block * pages_of,
            hash_block=block,
            max_batch_tokens=budget,
            max_running=max_running,
            num_drafts=drafts,
            draft=source,
            host_bytes=host * (PAGE_BYTES if external and host else 1),
            external=Dictionary() if external and host else None,
            prefix_cache=cache,
            overlap=overlap and not drafts,
            script=from_prefix(5, memory=2),
        )
        if store := self.driver.engine.memory.external:
            store.threads = AtOnce()
        self.version = 0

    @rule(
        base=st.sampled_from(BASES),
        shared=st.integers(0, 70),
        own=st.lists(st.integers(2, 6), max_size=12),
        max_tokens=st.integers(1, 30),
        salt=st.sampled_from(["", "", "", "other"]),
        priority=st.sampled_from([0, 0, 0, 1]),
        stop_ids=st.sampled_from([(), (), (3,)]),
    )
    def add(self, base, shared, own, max_tokens, salt, priority, stop_ids) -> None:
        prompt = (*base[:shared], *own) or (9,)
        if len(prompt) >= self.driver.engine.max_context:
            with pytest.raises(InputError, match="tokens"):
                self.driver.add(prompt)
            return
        self.driver.add(prompt, max_tokens, salt=salt, priority=priority, stop_ids=stop_ids)

    @rule(
        digests=st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=2),
        text=st.integers(0, 9),
    )
    def add_pictures(self, digests, text) -> None:
        prompt = (*BASES[0][:text], *(self.driver.runner.media_id for _ in digests), *BASES[1][:5])
        media = Media(None, None, tuple(digests))
        if len(prompt) + 3 * len(digests) < self.driver.engine.max_context:
            self.driver.add(prompt, 4, media=media)

    @rule(count=st.integers(1, 12))
    def steps(self, count) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.driver.served)
    @rule(data=st.data())
    def abort(self, data) -> None:
        self.driver.engine.abort(data.draw(st.sampled_from(sorted(self.driver.served))))

    @precondition(lambda self: self.driver.engine.scheduler.running)
    @rule(data=st.data())
    def abort_while_computing(self, data) -> None:
        running = [seq.request.id for seq in self.driver.engine.scheduler.running]
        name = data.draw(st.sampled_from(running))
        self._step_with(lambda: self.driver.engine.abort(name))

    @precondition(lambda self: self.driver.engine.scheduler.running)
    @rule()
    def preempt(self) -> None:
        self.driver.engine.scheduler.preempt(self.driver.engine.scheduler.running[-1])

    @rule()
    def a_run_breaks_off(self) -> None:
        def fail() -> None:
            raise BrokenRunError

        if self.driver.engine.scheduler.running or self.driver.engine.scheduler.waiting:
            # with overlap a step may only wait for what was launched by the one before
            overlaps = self.driver.engine.config.overlap
            with suppress(BrokenRunError) if overlaps else pytest.raises(BrokenRunError):
                self._step_with(fail)

    @precondition(lambda self: self.driver.engine.scheduler.running)
    @rule(data=st.data())
    def a_request_fails(self, data) -> None:
        running = [seq.request.id for seq in self.driver.engine.scheduler.running]
        self.driver.runner.errors = {data.draw(st.sampled_from(running))}
        self.driver.step()
        self.driver.runner.errors = set()

    @rule(data=st.data(), kind=st.sampled_from(["latents", "state"]))
    def lose(self, data, kind) -> None:
        memory = self.driver.engine.memory
        if keys := sorted(memory.pool.index[kind]):
            memory.lose(kind, data.draw(st.sampled_from(keys)))

    @rule()
    def new_weights(self) -> None:
        self.version += 1
        self.driver.runner.version = str(self.version)
        self.driver.engine.new_weights(str(self.version))

    @rule(what=st.sampled_from(["reset", "drop_host"]))
    def forget(self, what) -> None:
        getattr(self.driver.engine, what)()

    def _step_with(self, hook) -> None:
        run = self.driver.runner.run

        def hooked(plan):
            hook()
            return run(plan)

        self.driver.runner.run = hooked
        try:
            self.driver.step()
        finally:
            self.driver.runner.run = run

    @invariant()
    def every_page_and_slot_is_where_it_should_be(self) -> None:
        if hasattr(self, "driver"):
            check(self.driver.engine.scheduler, self.driver.engine.memory)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()
            self.driver.assert_idle()
            for served in self.driver.served.values():
                _check_end(served)


def _check_end(served) -> None:
    params = served.request.params
    assert len(served.ids) <= params.max_tokens
    if served.reason == "stop":
        assert served.ids[-1] in params.stop_ids
    assert not set(served.ids[:-1]) & set(params.stop_ids)
    assert all(token < NEVER for token in served.ids)


def test_any_order_of_events():
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
