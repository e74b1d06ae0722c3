"""Steps that are launched before the results of the one before are known."""

import pytest

from engine_driver import Driver, H, P, random_ids, serve_random
from openk3.engine import EngineConfig, Request
from openk3.engine.plan import UNKNOWN
from openk3.errors import ConfigError


class Log:
    """Notes when a driver's steps are launched, and when their results are asked for."""

    def __init__(self, driver):
        self.events, self.launch = [], driver.runner.launch
        driver.runner.launch = self

    def __call__(self, plan):
        number = sum(kind == "launch" for kind, _ in self.events)
        self.events.append(("launch", number))
        results = self.launch(plan)

        def wait():
            self.events.append(("wait", number))
            return results()

        return wait


def rows(driver):
    return [chunk for plan in driver.runner.plans for chunk in plan.chunks]


def test_a_step_is_launched_before_the_last_one_is_waited_for():
    driver = Driver(overlap=True)
    log = Log(driver)
    served = driver.add(random_ids(20), 4)
    driver.step()
    assert log.events == [("launch", 0), ("launch", 1), ("wait", 0)]
    driver.step()
    driver.step()
    assert [len(output.new_ids) for output in served.outputs] == [1, 1, 1]
    driver.step()
    assert log.events[3:] == [("launch", 2), ("wait", 1), ("launch", 3), ("wait", 2), ("wait", 3)]
    assert (served.reason, driver.engine.busy) == ("length", False)
    assert [chunk.token_ids for chunk in rows(driver)[1:]] == [(UNKNOWN,)] * 3
    driver.assert_idle()


@pytest.mark.parametrize("after", range(1, 6))
def test_a_stop_id_is_the_last_that_is_told(after):
    """The step behind it has been launched; its row is for nobody."""
    plain = Driver().run(random_ids(20), 10).ids
    stop = plain[after]
    driver = Driver(overlap=True)
    other = driver.add(random_ids(30, seed=1), 12)
    served = driver.run(random_ids(20), 10, stop_ids=(stop,))
    assert served.ids == plain[: plain.index(stop) + 1]
    assert served.reason == "stop"
    assert len(other.ids) == 12
    driver.assert_idle()


def test_prefixes_are_kept_and_found_as_ever():
    """Also those that end with a token which was not known when the step was planned."""
    found = []
    for overlap in (False, True):
        driver = Driver(overlap=overlap)
        first = driver.run(random_ids(2 * H + 3), 3 * P)
        asked = (*first.request.prompt_ids, *first.ids)
        found.append([driver.run((*asked[:end], 1)).cached for end in range(H, len(asked), 7)])
        states = driver.engine.memory.pool.index["state"]
        found[-1].append(len(states))
    assert found[0] == found[1]
    assert max(found[0]) > 2 * P


@pytest.mark.parametrize("num_pages", [12, 30, 200])
@pytest.mark.parametrize("num_host_pages", [0, 12])
def test_random_requests(num_pages, num_host_pages):
    sizes = {"num_pages": num_pages, "host_bytes": num_host_pages, "overlap": True}
    driver = serve_random(num_pages, 60, **sizes)
    stats = driver.engine.stats()
    assert stats.finished + stats.aborted == 60
    unknown = sum(chunk.token_ids == (UNKNOWN,) for chunk in rows(driver))
    assert unknown > 0.1 * stats.generated_tokens


def test_what_needs_the_last_token_is_not_ahead_of_it():
    for options in ({"presence_penalty": 0.5}, {"repetition_penalty": 1.1}):
        driver = Driver(overlap=True)
        driver.add(random_ids(9, seed=1), 20)
        driver.run(random_ids(20), 20, **options)
        assert UNKNOWN not in [chunk.token_ids[0] for chunk in rows(driver)]
    driver = Driver(overlap=True)
    request = Request("0", random_ids(9), constraint=object())  # type: ignore[arg-type]
    driver.engine.add(request)
    while driver.engine.busy:
        driver.engine.step()
    assert UNKNOWN not in [chunk.token_ids[0] for chunk in rows(driver)]


def test_a_request_that_comes_is_in_the_next_plan_but_one():
    driver = Driver(overlap=True)
    driver.add(random_ids(9, seed=1), 40)
    for _ in range(5):
        driver.step()
    late = driver.add(random_ids(20), 3)
    driver.step()
    driver.step()
    assert len(late.ids) == 1
    driver.drain()
    driver.assert_idle()


def test_requests_that_wait_for_pages_are_looked_at_now_and_then():
    driver = Driver(overlap=True, num_pages=12)
    running = driver.add(random_ids(2 * P), 3 * P)
    driver.step()
    waiting = driver.add(random_ids(9 * P, seed=1), 2)
    driver.drain()
    assert (running.reason, waiting.reason) == ("length", "length")
    known = [c for c in rows(driver) if c.request is running.request and c.token_ids[0] != UNKNOWN]
    assert 3 * P / 16 - 1 < len(known) - 1 < 3 * P / 4


@pytest.mark.parametrize("steps", range(4))
def test_an_abort_between_steps_leaves_a_row_that_nobody_looks_at(steps):
    driver = Driver(overlap=True)
    served, other = driver.add(random_ids(20), 50), driver.add(random_ids(9, seed=1), 9)
    for _ in range(steps):
        driver.step()
    driver.engine.abort(served.request.id)
    driver.step()
    assert (served.reason, len(served.ids)) == ("abort", steps)
    driver.drain()
    assert len(other.ids) == 9
    driver.assert_idle()


def test_new_weights_and_resets_wait_for_the_step_under_way():
    driver = Driver(overlap=True)
    served = driver.add(random_ids(2 * H), 30)
    for number in range(3):
        driver.step()
        driver.runner.version = str(number)
        driver.engine.new_weights(str(number))
        driver.step()
        driver.engine.reset()
    driver.drain()
    assert len(served.ids) == 30
    driver.assert_idle()


def test_a_request_that_fails_harms_nobody():
    driver = Driver(overlap=True)
    bad, good = driver.add(random_ids(20), 50), driver.add(random_ids(9, seed=1), 20)
    driver.step()
    driver.runner.errors = {bad.request.id}
    driver.step()
    driver.runner.errors = set()
    driver.drain()
    assert (bad.reason, len(good.ids)) == ("error", 20)
    driver.assert_idle()


@pytest.mark.parametrize("at", ["launch", "wait"])
def test_a_step_that_breaks_off_loses_no_token(at):
    driver = Driver(overlap=True)
    both = [driver.add(random_ids(40, seed=n), 40) for n in range(2)]
    for _ in range(10):
        driver.step()
    launch = driver.runner.launch

    def broken():
        raise OSError("out of memory")

    def fails(plan):
        launch(plan)
        return broken() if at == "launch" else broken

    driver.runner.launch = fails
    if at == "wait":
        driver.step()
    with pytest.raises(OSError, match="out of memory"):
        driver.step()
    driver.runner.launch = launch
    driver.drain()
    assert [len(served.ids) for served in both] == [40, 40]
    driver.assert_idle()


def test_drafts_and_single_rows_have_nothing_to_overlap():
    for options in ({"num_drafts": 2}, {"batch_invariant": True}):
        with pytest.raises(ConfigError, match="overlap"):
            EngineConfig(overlap=True, **options)
