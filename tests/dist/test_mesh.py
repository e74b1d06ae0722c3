"""The groups of a layout hold whom the arithmetic says."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from dist_workers import crew

from openk3.parallel.layout import Layout

pytestmark = pytest.mark.dist


def groups(world, layout):
    from openk3.parallel.mesh import Mesh

    mesh = Mesh(layout, world.device)
    members = {n: dist.get_process_group_ranks(getattr(mesh, n)) for n in GROUPS}
    return {**members, "place": mesh.place, "data_rank": mesh.data_rank}


GROUPS = ("state", "expert", "tokens")


def test_experts_are_divided_among_neighbours():
    found = crew(4).run(groups, Layout(shard=4, expert=2))
    assert [f["expert"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [f["state"] for f in found] == [[0, 1, 2, 3]] * 4
    assert [f["tokens"] for f in found] == [[0, 1, 2, 3]] * 4
    assert [f["place"] for f in found] == [f["data_rank"] for f in found] == [0, 1, 2, 3]


def test_copies_have_distinct_tokens_and_equal_state():
    found = crew(4).run(groups, Layout(replicate=2, shard=2, expert=2))
    assert [f["state"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [f["tokens"] for f in found] == [[0, 1, 2, 3]] * 4
    assert [f["place"] for f in found] == [0, 1, 0, 1]
    assert [f["data_rank"] for f in found] == [0, 1, 2, 3]


def test_processes_of_one_sequence_take_the_same_rows():
    found = crew(4).run(groups, Layout(shard=2, context=2, expert=4))
    assert [f["data_rank"] for f in found] == [0, 0, 1, 1]
    assert [f["expert"] for f in found] == [[0, 1, 2, 3]] * 4


def test_a_failed_check_shows_its_traceback_and_the_next_one_works():
    with pytest.raises(AssertionError, match="rank 1 is unhappy"):
        crew(2).run(fail)
    assert crew(2).run(rank_of) == [0, 1]


def fail(world):
    assert world.rank == 0, f"rank {world.rank} is unhappy"


def rank_of(world):
    return world.rank


def timeouts(world):
    from openk3.parallel.mesh import Mesh

    mesh = Mesh(Layout(shard=2, expert=2), world.device)
    mesh.wait_up_to(timedelta(seconds=77))
    groups = [mesh.state, mesh.expert, mesh.tokens, mesh.dense.get_group(), mesh.experts.get_group()]
    return [g._get_backend(world.device).options._timeout.total_seconds() for g in groups]


def test_every_group_waits_as_long_as_it_is_told():
    assert crew(2).run(timeouts) == [[77.0] * 5] * 2
