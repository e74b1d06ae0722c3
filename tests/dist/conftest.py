"""`ranks`: a check of the crew's processes that gets a process group of as many as it asks for."""

import functools

import pytest
import triton_interpreter  # noqa: F401  (the processes inherit its environment)
from dist_workers import crew

NUM_RANKS = 4


@functools.cache
def group_of(size):
    """The first `size` processes of the crew; all of them must ask for it."""
    import torch.distributed as dist

    return dist.new_group(list(range(size)))


def within(world, size, work, *args):
    """`work(group, *args)` on the first `size` processes."""
    group = group_of(size)
    return work(group, *args) if world.rank < size else None


@pytest.fixture(scope="session")
def ranks():
    """`ranks(size, work, *args)` -> [work(group, *args) of each rank], or the first failure."""
    return lambda size, *task: crew(NUM_RANKS).run(within, size, *task)[:size]
