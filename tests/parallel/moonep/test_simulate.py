"""The simulation draws what it says and counts what the plan says."""

import numpy as np
import pytest

from openk3.errors import ConfigError
from openk3.parallel.moonep.simulate import (
    Machine,
    Workload,
    draw_routing,
    popularity,
    simulate,
)

K3 = Workload(num_experts=896, top_k=16, tokens=512, latent=3584, inner=3072)
H200 = Machine(380e9, 600e12)


@pytest.mark.parametrize("skew", [0.0, 0.2, 4.0, 10.0])
def test_routing_has_distinct_experts_with_the_chances_asked_for(skew):
    rng = np.random.default_rng(0)
    share = popularity(K3, skew, rng)
    assert share.sum() == pytest.approx(16)
    assert share.max() / share.mean() - 1 == pytest.approx(skew, abs=1e-6)
    ids = draw_routing(share, 20000, rng)
    assert (np.diff(np.sort(ids, 1), axis=1) > 0).all()
    found = np.bincount(ids.reshape(-1), minlength=896) / 20000
    assert np.abs(found - share).max() < 5 * np.sqrt(share.max() / 20000)


def test_a_skewed_layer_of_k3():
    found = simulate(K3, H200, 32, 10.0)
    assert found.slots_median <= 3
    assert found.slots_p95 <= 5
    assert found.slots_max <= found.slots_bound == 28
    assert found.plain_imbalance > 1.1
    assert 0 < found.moved_share < 0.2
    assert found.expert_bytes == found.lent_max * 3 * 3584 * 3072 * 2
    # without a plan the busiest rank is sent more rows than any rank computes with one
    assert found.token_bytes < 512 * 16 * 3584 * 2 < found.token_bytes_plain
    moves = 5 * found.token_bytes / H200.bandwidth * 1e3
    assert found.exposed_ms >= moves


def test_one_rank_sends_nothing():
    found = simulate(K3, H200, 1, 4.0)
    assert (found.token_bytes, found.expert_bytes, found.exposed_ms) == (0, 0, 0.0)
    assert (found.plain_imbalance, found.moved_share, found.slots_max) == (1.0, 0.0, 0)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"896 experts do not divide by .* 6"):
        simulate(K3, H200, 6, 1.0)
    with pytest.raises(ConfigError, match=r"skew of 60 is impossible .* 0 to 55"):
        simulate(K3, H200, 8, 60.0)
