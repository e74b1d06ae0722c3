"""Memory of loaded tensors: own mappings that live exactly as long as their tensors."""

import mmap
import weakref

import pytest
import torch

from openk3.checkpoint.hf import read

SHAPE = (3, 1 << 18)


@pytest.fixture
def mappings(monkeypatch):
    """Weak references to every mapping made."""
    made = []

    class Mapping(mmap.mmap):
        def __init__(self, *args, **kwargs):
            made.append(weakref.ref(self))

    monkeypatch.setattr(read.mmap, "mmap", Mapping)
    return made


def fill_and_check(tensor, dtype):
    assert (tuple(tensor.shape), tensor.dtype) == (SHAPE, dtype)
    assert tensor.is_contiguous()
    assert bool((tensor.fill_(3) == 3).all())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_mapping_lives_as_long_as_the_last_view_of_its_tensor(mappings, dtype):
    tensor = read.allocate_lasting(SHAPE, dtype)
    fill_and_check(tensor, dtype)
    assert len(mappings) == 1
    row = tensor[1]
    del tensor
    assert mappings[0]() is not None
    assert bool((row == 3).all())
    del row
    assert mappings[0]() is None


def test_small_tensors_take_no_mapping(mappings):
    assert read.allocate_lasting((5, 7), torch.float32).shape == (5, 7)
    assert mappings == []


def test_systems_without_huge_pages_use_ordinary_memory(mappings, monkeypatch):
    monkeypatch.delattr(read.mmap, "MADV_HUGEPAGE", raising=False)
    fill_and_check(read.allocate_lasting(SHAPE, torch.float32), torch.float32)
    assert mappings == []


def test_a_kernel_that_refuses_the_advice_or_the_mapping_is_no_error(monkeypatch):
    class NoAdvice(mmap.mmap):
        def madvise(self, *args):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(read.mmap, "mmap", NoAdvice)
    fill_and_check(read.allocate_lasting(SHAPE, torch.float32), torch.float32)

    def refuse(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(read.mmap, "mmap", refuse)
    fill_and_check(read.allocate_lasting(SHAPE, torch.float32), torch.float32)
    with pytest.raises(MemoryError):
        read.allocate_lasting((1 << 60,), torch.uint8)
