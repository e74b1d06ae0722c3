"""Expert parallelism refuses what it cannot do, and names the numbers."""

from types import SimpleNamespace

import pytest
import torch

from moe_cases import Toy
from openk3.errors import ConfigError, InputError
from openk3.parallel.alltoall import AllToAllDispatcher
from openk3.parallel.experts import keep_block
from openk3.parallel.moonep import MoonEPDispatcher

TWO_RANKS = SimpleNamespace(num_ranks=2, rank=0, size=lambda: 2)


def test_experts_that_do_not_divide():
    words = "7 experts do not divide by an expert-parallel size of 2"
    with pytest.raises(ConfigError, match=words):
        MoonEPDispatcher(None, 7, TWO_RANKS)
    with pytest.raises(ConfigError, match=words):
        AllToAllDispatcher(TWO_RANKS, 7)
    with pytest.raises(ConfigError, match=words):
        keep_block(Toy(7), 0, 2)


def test_a_block_is_a_copy_of_the_ranks_own_experts():
    whole = Toy(6)
    weights = {name: w.detach().clone() for name, w in whole.named_parameters()}
    mine = keep_block(whole, 1, 3)
    assert mine.num_experts == 2
    for name, w in mine.named_parameters():
        assert torch.equal(w, weights[name][2:4])
        assert w.is_leaf
        assert w.untyped_storage().nbytes() == w.nbytes  # the others' memory is free


def test_experts_of_another_kind_or_number():
    dispatcher = MoonEPDispatcher(None, 8, TWO_RANKS)
    x, ids, weights = torch.zeros(1, 8), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    with pytest.raises(InputError, match="4 stacked experts, not with 8 of Toy"):
        dispatcher(x, ids, weights, Toy(8))
    with pytest.raises(ConfigError, match="resident experts, not SimpleNamespace"):
        keep_block(SimpleNamespace(num_experts=4), 0, 2)
    with pytest.raises(ConfigError, match="a process group or a transport"):
        MoonEPDispatcher(None, 8)
