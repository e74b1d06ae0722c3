"""Random requests, aborts and weights over a small pool; the scripted runner checks every read."""

import pytest

from engine_driver import Driver, serve_random


def check_ends(driver: Driver, total: int) -> None:
    for served in driver.served.values():
        if served.reason == "length":
            assert len(served.ids) == served.request.params.max_tokens
    stats = driver.engine.stats()
    assert stats.finished + stats.aborted == total
    assert stats.aborted > 0


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("num_host_pages", [0, 12])
@pytest.mark.parametrize("num_pages", [12, 30, 200])
def test_random_requests_leave_nothing_behind(num_pages, num_host_pages, num_drafts):
    sizes = {"num_pages": num_pages, "host_bytes": num_host_pages, "num_drafts": num_drafts}
    driver = serve_random(num_pages + num_drafts, 40, **sizes)
    check_ends(driver, 40)
    stats = driver.engine.stats()
    assert stats.cached_tokens > 0 or num_pages < 200
    assert (stats.accepted_tokens > 0) == (num_drafts > 0)
    assert stats.preemptions > 0 or num_pages > 12


def test_a_thousand_requests_with_aborts():
    sizes = {"num_pages": 60, "host_bytes": 20, "max_batch_tokens": 64}
    driver = serve_random(0, 1000, debug=False, check_every=50, num_drafts=2, **sizes)
    check_ends(driver, 1000)
