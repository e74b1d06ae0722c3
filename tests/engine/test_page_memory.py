"""The pool's bytes: how a model is cut into pages, copies in order, and both kinds of host tier."""

import random

import pytest
import torch

from openk3.config import preset
from openk3.engine.page_memory import PageMemory
from openk3.engine.plan import Copy
from openk3.engine.types import EngineConfig
from openk3.errors import ConfigError, StorageError

CPU = torch.device("cpu")


def memory(**options):
    sizes = {"hash_block": 8, "page_tokens": 16, "num_pages": 12}
    return PageMemory(preset("nano"), EngineConfig(**sizes | options), CPU, torch.float32)


def test_k3_is_cut_as_the_report_says():
    """69 KDA layers by 24 MLA layers; a state of 6.6 MB fits the latents of 6,144 tokens."""
    config = EngineConfig(num_pages=2)
    with torch.device("meta"):
        made = PageMemory(preset("k3"), config, torch.device("meta"), torch.bfloat16)
    assert made.geometry.kda_groups == 3
    assert made.geometry.layers_per_group == 24
    assert made.geometry.page_tokens == 6144
    assert made.geometry.page_bytes == 6144 * 576 * 2


def test_views_of_different_pages_and_layers_do_not_overlap():
    made = memory()
    made.pool.zero_()
    for layer in made.kda_layers:
        S, conv = made.states(layer)
        S[3], conv[3] = layer + 1, layer + 1
    for layer in made.mla_layers:
        made.latents(layer)[4] = layer + 1
    groups = {}
    for layer in made.kda_layers:
        groups.setdefault(made.group_of(layer), []).append(layer)
    assert all(len(own) <= made.geometry.layers_per_group for own in groups.values())
    last = groups[len(groups) - 1]
    for layer in last:  # a page id belongs to one group; the last writer's values stand whole
        S, conv = made.states(layer)
        assert bool((S[3] == layer + 1).all())
        assert bool((conv[3] == layer + 1).all())
        assert not bool(S[:3].any())
    for layer in made.mla_layers:
        assert bool((made.latents(layer)[4] == layer + 1).all())


@pytest.mark.parametrize("in_file", [False, True])
def test_copies_are_as_if_one_after_the_other(in_file, tmp_path):
    page = memory().geometry
    file = str(tmp_path / "tier") if in_file else None
    made = memory(host_bytes=5 * page.page_bytes * page.layers_per_group, host_file=file)
    rng = random.Random(0)
    counts = {"pool": 12, "host": 5}
    naive = {tier: [i + 100 * (tier == "host") for i in range(n)] for tier, n in counts.items()}
    for tier, values in naive.items():
        target = made.pool if tier == "pool" else made._host_pool()
        for i, value in enumerate(values):
            target[:, i] = value
    copies = []
    for _ in range(200):
        tiers = [rng.choice(("pool", "host")) for _ in range(2)]
        source, target = (rng.randrange(counts[tier]) for tier in tiers)
        copies.append(Copy(source, target, *tiers))
        naive[tiers[1]][target] = naive[tiers[0]][source]
    made.copy(copies)
    for i, value in enumerate(naive["pool"]):
        assert bool((made.pool[:, i] == value).all())
    assert [int(x) for x in made._host_pool()[0, :, 0]] == naive["host"]
    made.drop_host()
    assert made._host is None


def test_too_little_memory_is_told():
    with pytest.raises(ConfigError, match="the engine needs 3 at least"):
        memory(num_pages=None, memory_bytes=1 << 16)


def test_more_pages_than_can_be_had_is_an_error_with_advice():
    for count in (1 << 44, 1 << 80):
        with pytest.raises(ConfigError, match="cannot be had on cpu: give a smaller num_pages"):
            memory(num_pages=count)


def test_what_is_free_is_shared_by_the_pool_and_the_host_tier(monkeypatch):
    page = memory().pool[:, 0].nbytes
    monkeypatch.setattr("openk3.engine.page_memory.free_memory", lambda: 30 * page)
    assert memory(num_pages=None).geometry.num_pages == 14  # half, and a page for idle rows
    pool = 13 * page
    memory(host_bytes=30 * page - pool)
    with pytest.raises(ConfigError, match=rf"are more than the {30 * page - pool} that are free"):
        memory(host_bytes=31 * page - pool)
    with pytest.raises(ConfigError, match="host_bytes must be at least 0, not -1"):
        memory(host_bytes=-1)


def test_the_pool_is_no_larger_than_what_runs_can_use(monkeypatch):
    monkeypatch.setattr("openk3.engine.page_memory.free_memory", lambda: 1 << 30)
    model = preset("nano").replace(max_position_embeddings=1000)
    one, two = (
        PageMemory(model, EngineConfig(hash_block=8, max_running=n), CPU, torch.float32).geometry
        for n in (1, 2)
    )
    assert two.num_pages == 2 * one.num_pages
    assert (one.num_pages - one.kda_groups) * one.page_tokens > 1000
    assert one.num_pages * one.page_bytes * one.layers_per_group < 100e6


def test_a_host_file_is_there_whole_and_belongs_to_one_engine(tmp_path):
    page, file = memory().geometry, tmp_path / "tier"
    size = 5 * page.page_bytes * page.layers_per_group
    made = memory(host_bytes=size, host_file=str(file))
    assert file.stat().st_blocks * 512 >= size
    with pytest.raises(StorageError, match="is in use by another engine"):
        memory(host_bytes=size, host_file=str(file))
    del made
    memory(host_bytes=size, host_file=str(file))
    with pytest.raises(StorageError, match=f"{file}/x, {size} bytes: Not a directory"):
        memory(host_bytes=size, host_file=f"{file}/x")
