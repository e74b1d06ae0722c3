"""The planner's kernel, in the interpreter where there is no GPU, makes the reference's plan."""

import numpy as np
import pytest
import torch

from openk3.parallel.moonep.planner import solve

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def on_device():
    return pytest.importorskip(
        "openk3.parallel.moonep.planner_gpu", exc_type=ImportError
    ).solve_on_device


@pytest.mark.parametrize(("ranks", "block"), [(1, 4), (2, 3), (3, 5), (8, 1), (8, 14), (16, 4)])
def test_the_kernel_agrees_with_the_reference(on_device, ranks, block):
    rng = np.random.default_rng(ranks * 100 + block)
    for case in range(6):
        counts = rng.integers(0, 50, (ranks, ranks * block))
        if case == 1:  # one expert takes all
            counts[:, 1:] = 0
        elif case == 2:  # appendix E's tight case
            counts[:] = 7
            counts[:, :block] = 0
        elif case == 3:
            counts[:] = 0
        elif case == 4:
            counts = rng.multinomial(900, rng.dirichlet(np.full(ranks * block, 0.2)), size=ranks)
        elif case == 5:
            counts[:] = 3
        found = on_device(torch.from_numpy(counts.astype(np.int64)).to(DEVICE))
        assert (found.cpu().numpy() == solve(counts.sum(0), ranks)).all()
