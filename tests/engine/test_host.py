"""The host tier: what the pool evicts comes back, both halves at one position, within bounds."""

import pytest

from engine_driver import Driver, H, P, random_ids

SMALL = {"num_pages": 12, "host_bytes": 64}
"""Of the scripted runner's pages, each of a byte: 12 in the pool, 64 in host memory."""


def churn(driver: Driver, count: int = 6) -> None:
    """Prompts that push everything else out of the pool."""
    for n in range(count):
        driver.run(random_ids(5 * P, seed=100 + n))


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_an_evicted_prefix_comes_back(num_drafts):
    driver = Driver(**SMALL, num_drafts=num_drafts)
    prompt = random_ids(3 * P + 2 * H)
    driver.run(prompt)
    churn(driver)
    served = driver.run((*prompt, *random_ids(9, seed=1)), 3 * H)
    assert served.cached == 3 * P + 2 * H
    stats = driver.engine.stats()
    assert stats.host_hits >= 4 + 2
    driver.assert_idle()


def test_without_a_host_tier_it_is_gone():
    driver = Driver(num_pages=12)
    prompt = random_ids(3 * P + 2 * H)
    driver.run(prompt)
    churn(driver)
    assert driver.run((*prompt, 5)).cached == 0


def test_the_first_pass_finds_what_the_same_plan_brings():
    driver = Driver(**SMALL)
    prompt = random_ids(3 * P)
    driver.run(prompt)
    churn(driver)
    steps = len(driver.runner.plans)
    driver.run((*prompt, 5))
    plan = driver.runner.plans[steps]
    assert [copy.source_tier for copy in plan.copies if copy.target_tier == "pool"] == ["host"] * 5
    assert plan.chunks[0].start == 3 * P


@pytest.mark.parametrize("lost", ["latents", "state"])
def test_half_of_a_prefix_is_no_hit(lost):
    driver = Driver(**SMALL)
    prompt = random_ids(3 * P)
    driver.run(prompt)
    key = driver.engine.memory.chain(
        driver.served["0"].request, driver.runner.expand(driver.served["0"].request)
    ).keys[-1]
    churn(driver)
    assert driver.engine.memory.lose(lost, key)
    # The checkpoint before the last token of the prompt is still there, in full; both it and the
    # lost one lie in the last page, whose latents are gone for all its blocks.
    assert driver.run((*prompt, 5)).cached == (3 * P - H if lost == "state" else 0)


def test_it_is_bounded_and_the_oldest_goes():
    driver = Driver(num_pages=12, host_bytes=9)
    for n in range(12):
        driver.run(random_ids(4 * P, seed=n))
        assert driver.engine.stats().host_pages <= 9
    assert driver.engine.stats().host_pages > 0
    assert driver.run(random_ids(4 * P, seed=0)).cached == 0


def test_a_page_that_has_grown_replaces_its_copy():
    driver = Driver(**SMALL)
    prompt = random_ids(2 * H)
    driver.run(prompt)
    churn(driver)
    longer = (*prompt, *random_ids(H, seed=1))
    assert driver.run(longer).cached == 2 * H
    churn(driver)
    host = driver.engine.memory.host.index["latents"]
    keys = driver.engine.memory.chain(
        driver.served["0"].request, driver.runner.expand(driver.served["0"].request)
    ).keys
    assert host[keys[0]] is host[keys[1]]
    assert host[keys[0]].end == 3 * H
    assert driver.run((*longer, 5)).cached == 3 * H


def test_dropped_on_request():
    driver = Driver(**SMALL)
    prompt = random_ids(3 * P)
    driver.run(prompt)
    churn(driver)
    driver.engine.drop_host()
    assert driver.engine.stats().host_pages == 0
    assert driver.runner.memory["host"] == {}
    assert driver.run((*prompt, 5)).cached == 0
    churn(driver)
    assert driver.engine.stats().host_pages > 0


def test_new_weights_empty_it():
    driver = Driver(**SMALL)
    prompt = random_ids(3 * P)
    driver.run(prompt)
    churn(driver)
    driver.runner.version = "2"
    driver.engine.new_weights("2")
    assert driver.run((*prompt, 5)).cached == 0
