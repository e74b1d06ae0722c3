"""The pickle of a sharded checkpoint is read without running what it may hold."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from openk3.checkpoint.sharded import Box, Reader, _SavePlanner, read_whole
from openk3.errors import CheckpointError

TENSORS = {
    "a": torch.arange(24.0).view(6, 4),
    "b": torch.tensor(3),
    "c": torch.ones(4, dtype=torch.bfloat16),
}


@pytest.fixture
def folder(tmp_path):
    dcp.save(
        {f"model/{name}": Box.whole(tensor) for name, tensor in TENSORS.items()},
        storage_writer=FileSystemWriter(tmp_path / "step"),
        planner=_SavePlanner(),
        no_dist=True,
    )
    return tmp_path / "step"


def test_what_was_saved_is_read(folder):
    found = read_whole(folder, "model")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_code_in_it_is_refused_and_not_run(folder, tmp_path):
    mark = tmp_path / "ran"
    evil = pickle.dumps(Evil(mark))
    pickle.loads(evil).close()
    assert mark.exists(), "the attack works on an ordinary unpickler"
    mark.unlink()
    (folder / ".metadata").write_bytes(evil)
    with pytest.raises(CheckpointError, match=r"\.metadata: it names \w+\.open, which no check"):
        Reader(folder)
    assert not mark.exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"not a pickle",
        lambda data: pickle.dumps({"a": 1}),
        lambda data: pickle.dumps(torch.float32),
    ],
)
def test_damage_is_named(folder, spoil):
    file = folder / ".metadata"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        Reader(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata: .*No such file"):
        Reader(folder)
