"""The one-process world is the identity; device names are checked."""

import pytest
import torch

from openk3.errors import BackendError, ConfigError
from openk3.parallel import world as world_module
from openk3.parallel.world import World, join, pick_device, pick_dtype


def test_one_process_needs_no_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with join("cpu") as world:
        x = torch.tensor([1.0, -2.0])
        world.sum_all([x])
        world.copy_from_main([x])
        world.barrier()
        assert world.sum(x) is x
        assert world.max(x) is x
        assert world.share("v") == "v"
        assert x.tolist() == [1.0, -2.0]
        assert world == World(0, 1, torch.device("cpu"))
        assert not torch.distributed.is_initialized()


def test_buckets_keep_order_and_split_by_size_and_dtype(monkeypatch):
    monkeypatch.setattr(world_module, "BUCKET_BYTES", 16)
    tensors = [torch.zeros(n, dtype=d) for n, d in [(2, torch.float32)] * 5]
    tensors.insert(3, torch.zeros(2, dtype=torch.float64))
    found = [[id(t) for t in b] for b in world_module._buckets(tensors)]
    ids = [id(t) for t in tensors]
    assert found == [ids[:2], ids[2:3], ids[3:4], ids[4:]]


def test_device_names(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").type == "cpu"
    for name in ("gpu", "meta", "mps", "cpu:7", "cuda:-1", ""):
        with pytest.raises(ConfigError, match=f"'{name}'; allowed: auto, cpu, cuda"):
            pick_device(name)
    with pytest.raises(BackendError, match="needs GPU 2, but torch sees 0"):
        pick_device("cuda:2")


def test_dtypes_are_named():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert [pick_dtype("auto", place) for place in (cpu, gpu)] == [torch.float32, torch.bfloat16]
    assert pick_dtype("bfloat16", cpu) == torch.bfloat16
    assert pick_dtype("float32", gpu) == torch.float32
    for name in ("float16", "nn", ""):
        with pytest.raises(ConfigError, match=f"'{name}'; allowed: auto, float32, bfloat16"):
            pick_dtype(name, cpu)
