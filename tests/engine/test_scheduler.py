"""Who advances, who waits, who is dropped, how requests end."""

from types import SimpleNamespace

import pytest

from engine_driver import END, NEVER, Driver, H, P, random_ids
from openk3.engine import Engine, EngineConfig, Request, SamplingParams
from openk3.engine.budget import share
from openk3.engine.plan import UNKNOWN
from openk3.engine.scheduler import MAX_PASSED
from openk3.engine.scripted import ScriptedRunner, from_ids, from_prefix
from openk3.errors import ConfigError, ConflictError, InputError, LimitError


def sizes_of(driver: Driver) -> list[dict[str, int]]:
    """Tokens by request, of each step so far."""
    return [
        {chunk.request.id: len(chunk.token_ids) for chunk in plan.chunks}
        for plan in driver.runner.plans
    ]


def test_an_idle_engine_does_nothing():
    driver = Driver()
    assert driver.step() == []
    assert not driver.engine.busy
    assert driver.runner.plans == []


def test_decoding_rows_come_first_and_prefill_fills_the_rest():
    driver = Driver(max_batch_tokens=64)
    driver.add(random_ids(10), 50)
    driver.step()
    driver.add(random_ids(200, seed=1), 5)
    driver.drain()
    assert sizes_of(driver)[:5] == [{"0": 10}, *[{"0": 1, "1": 63}] * 3, {"0": 1, "1": 11}]


def prefill(arrival: int, remaining: int) -> SimpleNamespace:
    return SimpleNamespace(rank=(0, arrival), remaining=remaining)


@pytest.mark.parametrize(
    ("remaining", "dealt"),
    [
        ([1000], {0: 64}),
        ([1000, 1000], {0: 32, 1: 32}),
        ([1000, 1000, 10], {0: 32, 1: 22, 2: 10}),
        ([1000, 10, 10], {0: 44, 1: 10, 2: 10}),
        ([5, 1000, 1000], {0: 5, 1: 59}),
        ([1000, *[10] * 5], {0: 32, 1: 10, 2: 10, 3: 10, 4: 2}),
    ],
)
def test_the_first_is_sure_of_half_and_the_least_goes_before_the_rest(remaining, dealt):
    prefills = [prefill(arrival, count) for arrival, count in enumerate(remaining)]
    assert {seq.rank[1]: count for seq, count in share(prefills, 64)} == dealt


def test_more_decoding_rows_than_budget_take_turns():
    driver = Driver(max_batch_tokens=4)
    served = [driver.add(random_ids(2, seed=n), 30) for n in range(9)]
    driver.drain()
    for one in served:
        gaps = [b - a for a, b in zip(one.steps, one.steps[1:], strict=False)]
        assert max(gaps) <= 2 * 9
        assert len(one.ids) == 30


def test_priority_goes_before_arrival():
    driver = Driver(max_running=1)
    low = [driver.add(random_ids(9, seed=n), 2) for n in range(2)]
    high = driver.add(random_ids(9, seed=5), 2, priority=1)
    driver.drain()
    assert high.steps[-1] < low[0].steps[0] < low[1].steps[0]


def test_nobody_is_dropped_for_one_that_comes_after_it():
    driver = Driver(num_pages=14)
    first = driver.add(random_ids(4 * P), 3 * P)
    driver.step()
    late = driver.add(random_ids(3 * P, seed=1), 3 * P)
    driver.step()
    assert driver.engine.stats().running == 2
    driver.drain()
    assert driver.engine.stats().preemptions >= 1
    assert first.steps == list(range(1, 3 * P + 1))
    assert len(late.ids) == 3 * P


def test_a_preempted_request_starts_from_its_best_checkpoint():
    driver = Driver(num_pages=40)
    served = driver.add(random_ids(5 * H), 3 * H)
    for _ in range(2 * H):
        driver.step()
    driver.engine.scheduler.preempt(driver.engine.scheduler.running[0])
    driver.step()
    start = driver.runner.plans[-1].chunks[0].start
    assert start == (5 * H + 2 * H - 1) // H * H
    driver.drain()
    assert served.cached == 0


def test_admissions_wait_for_pages_that_running_ones_will_need():
    """A long prompt that is computed in chunks has not taken its pages yet; others may not."""
    driver = Driver(num_pages=14, max_batch_tokens=64)
    driver.add(random_ids(8 * P), 2)
    driver.step()
    second = driver.add(random_ids(4 * P, seed=1), 2)
    driver.step()
    assert driver.engine.stats().waiting == 1
    driver.drain()
    assert driver.engine.stats().preemptions == 0
    assert second.reason == "length"


def test_preemptions_make_admissions_careful_for_a_while():
    driver = Driver(num_pages=16)
    scheduler = driver.engine.scheduler
    before = scheduler.expected
    for n in range(2):
        driver.add(random_ids(5 * P, seed=n), 3 * P)
    while scheduler.preemptions == 0:
        driver.step()
    raised = scheduler.expected
    assert raised > before
    driver.drain()
    assert before <= scheduler.expected < raised


def test_small_requests_pass_one_without_pages_but_not_for_ever():
    driver = Driver(num_pages=24, max_running=8)
    keeper = driver.add(random_ids(10 * P), 5000)
    driver.step()
    big = driver.add(random_ids(9 * P, seed=1))
    passed = 0
    while driver.engine.scheduler.waiting and passed < 3 * MAX_PASSED:
        small = driver.add(random_ids(5, seed=passed), 1)
        driver.step()
        passed += small.reason is not None
        if small.reason is None:
            break
    assert MAX_PASSED <= passed < 3 * MAX_PASSED
    driver.engine.abort(keeper.request.id)
    driver.drain()
    assert big.reason == "length"


def test_a_queue_has_a_bound():
    driver = Driver(max_queued=2, max_running=1)
    driver.add(random_ids(5))
    driver.step()
    driver.drain()
    for n in range(2):
        driver.add(random_ids(5, seed=n), 3)
    with pytest.raises(LimitError, match=r"2 requests are waiting"):
        driver.add(random_ids(5))
    driver.drain()
    driver.assert_idle()


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ((), InputError, "empty"),
        ((3, 128), InputError, r"outside \[0, 128\): 128"),
        ((3, -1), InputError, "outside"),
        ((3,) * 100, InputError, "has 100 tokens.*may have\n? *100"),
    ],
)
def test_requests_that_cannot_run(prompt, error, match):
    driver = Driver(max_positions=100)
    with pytest.raises(error, match=match):
        driver.add(prompt)
    assert not driver.engine.busy


@pytest.mark.parametrize("strange", [-1, 128, 10**30])
def test_a_bias_for_no_token_is_refused(strange):
    driver = Driver()
    params = SamplingParams(logit_bias={5: 1.0, strange: 1.0})
    with pytest.raises(InputError, match=rf"logit_bias has an id outside \[0, 128\): {strange}"):
        driver.engine.add(Request("a", (3, 4), params))
    assert not driver.engine.busy


def test_ids_of_running_requests_differ():
    driver = Driver()
    served = driver.add(random_ids(5), 2)
    with pytest.raises(ConflictError, match="running"):
        driver.engine.add(served.request)
    driver.drain()
    driver.engine.add(served.request)


def test_sizes_that_hold_nothing():
    with pytest.raises(ConfigError, match="hold no sequence"):
        Driver(num_pages=2)
    with pytest.raises(ConfigError, match="multiple of hash_block"):
        Driver(page_tokens=24)


def ends(output: list[int], **options):
    runner = ScriptedRunner(from_ids({"0": output}, END), vocab_size=128, end_id=END)
    driver = Driver(script=runner.script)
    return driver.run(random_ids(9), 10, **options)


def test_how_requests_end():
    assert (ends([5, 6]).ids, ends([5, 6]).reason) == ([5, 6, END], "stop")
    assert ends([5, 6], ignore_eos=True).ids == [5, 6, *[END] * 8]
    assert ends([5, 6, 7], stop_ids=(6,)).ids == [5, 6]
    assert ends([5] * 20).reason == "length"
    assert len(ends([5] * 20).ids) == 10


def test_a_stop_inside_of_a_window_of_drafts():
    driver = Driver(num_drafts=4, script=from_ids({"0": [4, 5, 6, 7, 8, 9] * 3}, END))
    served = driver.run((4, 5, 6, 7, 8, 9) * 3, 18, stop_ids=(8,))
    assert served.ids == [4, 5, 6, 7, 8]
    assert driver.engine.stats().accepted_tokens > 0
    driver.assert_idle()


def test_the_context_ends_a_request():
    driver = Driver(max_positions=50, num_drafts=3)
    served = driver.run((3, 4) * 20, 100)
    assert (len(served.ids), served.reason) == (10, "length")
    driver = Driver(num_pages=4, num_drafts=3)
    assert driver.engine.max_context == 2 * P
    assert len(driver.run(random_ids(P), 500).ids) == P


def test_a_request_that_fails_leaves_nothing_and_harms_nobody():
    driver = Driver()
    prompt = random_ids(4 * H)
    bad, good = driver.add(prompt, 50), driver.add(random_ids(30, seed=1), 50)
    for _ in range(2 * H):
        driver.step()
    driver.runner.errors = {bad.request.id}
    driver.step()
    assert bad.reason == "error"
    assert bad.outputs[-1].error
    driver.runner.errors = set()
    driver.drain()
    assert len(good.ids) == 50
    assert driver.run(prompt).cached == 0


def test_a_step_that_breaks_off_loses_no_token():
    driver = Driver()
    both = [driver.add(random_ids(40, seed=n), 40) for n in range(2)]
    for _ in range(10):
        driver.step()
    run = driver.runner.run

    def fails(plan):
        run(plan)
        raise OSError("out of memory")

    driver.runner.run = fails
    with pytest.raises(OSError, match="out of memory"):
        driver.step()
    assert driver.engine.stats().cached_pages == 0
    driver.runner.run = run
    driver.drain()
    assert [len(served.ids) for served in both] == [40, 40]
    driver.assert_idle()


def test_new_weights_use_no_memory_of_the_old_ones():
    driver = Driver()
    prompt = random_ids(4 * H)
    driver.run(prompt)
    half = driver.add((*prompt, *random_ids(H, seed=1)), 20)
    driver.step()
    driver.runner.version = "2"
    driver.engine.new_weights("2")
    driver.step()
    assert driver.runner.plans[-1].chunks[0].start == 0
    driver.drain()
    assert (half.cached, len(half.ids)) == (4 * H, 20)
    assert driver.engine.stats().preemptions == 0
    assert driver.run((*prompt, 5)).cached == 4 * H


def test_reset_forgets_prefixes_and_lets_requests_run():
    driver = Driver()
    running = driver.add(random_ids(40), 30)
    driver.run(random_ids(5 * H, seed=1))
    driver.add(random_ids(5 * H, seed=2), 30)
    driver.step()
    driver.engine.reset()
    assert driver.run(random_ids(5 * H, seed=1)).cached == 0
    assert len(running.ids) == 30


def test_whole_engine_calls_wait_for_the_step():
    driver = Driver()
    driver.add(random_ids(9))
    run, caught = driver.runner.run, []

    def inside(plan):
        for call in (driver.engine.reset, driver.engine.drop_host):
            with pytest.raises(ConflictError, match="between steps"):
                call()
            caught.append(call)
        return run(plan)

    driver.runner.run = inside
    driver.step()
    assert len(caught) == 2


def test_without_a_prefix_cache_nothing_is_kept():
    driver = Driver(prefix_cache=False)
    driver.run(random_ids(5 * H), 20)
    assert driver.engine.stats().cached_pages == 0
    assert driver.run(random_ids(5 * H)).cached == 0
    assert not any(chunk.checkpoints for plan in driver.runner.plans for chunk in plan.chunks)


def test_stats_tell_waiting_and_work():
    driver = Driver(max_running=1)
    driver.add(random_ids(40), 3)
    driver.step()
    driver.clock.time = 5.0
    driver.add(random_ids(40, seed=1), 3)
    driver.clock.time = 7.5
    stats = driver.engine.stats()
    assert (stats.running, stats.waiting, stats.wait_seconds) == (1, 1, 2.5)
    driver.drain()
    stats = driver.engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.finished) == (80, 6, 2)
    assert (stats.computed_tokens, stats.wait_seconds) == (80 + 4, 0.0)


def test_windows_of_drafts_stay_within_a_block_and_a_batch():
    driver = Driver(num_drafts=5, max_batch_tokens=12, script=from_prefix(3, memory=1))
    for n in range(4):
        driver.add((n, 3, 4) * 6, 4 * H)
    driver.drain()
    drafted = [c for plan in driver.runner.plans for c in plan.chunks if c.num_drafts]
    assert drafted
    for chunk in drafted:
        end = chunk.start + len(chunk.token_ids)
        assert chunk.start // H == (end - 1) // H
    for plan in driver.runner.plans:
        assert sum(len(chunk.token_ids) for chunk in plan.chunks) <= 12
    assert driver.engine.stats().accepted_tokens > 0


def test_a_request_with_a_grammar_is_not_drafted_for():
    driver = Driver(num_drafts=3, script=from_prefix(2, memory=1))
    request = Request("0", (3, 4) * 10, constraint=object())  # type: ignore[arg-type]
    driver.engine.add(request)
    while driver.engine.busy:
        driver.engine.step()
    assert driver.engine.stats().drafted_tokens == 0


def test_drafts_of_a_draft_layer():
    """The runner makes them; the plan says how many."""
    driver = Driver(num_drafts=2, draft="mtp")
    served = driver.run(random_ids(10), 40)
    stats = driver.engine.stats()
    assert len(served.ids) == 40
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    windows = [chunk.token_ids for plan in driver.runner.plans for chunk in plan.chunks]
    assert {ids[1:] for ids in windows[1:]} == {(), (UNKNOWN,), (UNKNOWN, UNKNOWN)}
    driver.assert_idle()


@pytest.mark.parametrize("num_pages", [256, 12])
def test_warming_up_leaves_nothing_behind(num_pages):
    driver = Driver(num_pages=num_pages, script=from_prefix(NEVER))
    driver.engine.warm_up()
    assert driver.runner.plans == []  # this runner compiles nothing
    driver.runner.warm_up = lambda: True
    driver.engine.warm_up()
    lengths = {sum(len(chunk.token_ids) for chunk in plan.chunks) for plan in driver.runner.plans}
    assert {1, 16, 33 + 47} <= lengths
    stats = driver.engine.stats()
    assert (stats.steps, stats.cached_pages, stats.finished) == (0, 0, 0)
    running = driver.add(random_ids(9), 5)
    with pytest.raises(ConflictError, match="before the first"):
        driver.engine.warm_up()
    driver.drain()
    assert len(running.ids) == 5
    driver.assert_idle()


def test_an_engine_of_a_runner_has_defaults():
    engine = Engine(ScriptedRunner(from_prefix(9), page_tokens=512), EngineConfig())
    engine.add(Request("a", (1, 2, 3)))
    while engine.busy:
        engine.step()
    assert 0 < engine.stats().generated_tokens <= 128
