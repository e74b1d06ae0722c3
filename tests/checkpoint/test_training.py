"""Training checkpoints: complete or absent, verified, kept in number, refused when foreign."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from openk3.checkpoint.training import Checkpoint, CheckpointFolder, check, read, require_same
from openk3.errors import CheckpointError, StorageError


def make(step, seed=0):
    g = torch.Generator().manual_seed(seed + step)
    return Checkpoint(
        step=step,
        tensors={
            "model": {
                "w": torch.randn(5, 3, generator=g),
                "t": torch.randn(4, 6, generator=g).T,
                "counts": torch.arange(7),
                "flag": torch.tensor(3.0, dtype=torch.bfloat16),
            },
            "optimizer": {"muon.w": torch.randn(5, 3, generator=g)},
        },
        deciding={"optim.lr": 0.1 + 0.2, "data.weights": [1.0], "model.vision": None},
        loop={"position": 7, "guard": {"mean": 1 / 3}},
    )


def equal(a, b):
    return all(
        torch.equal(t, b.tensors[stem][n]) for stem in a.tensors for n, t in a.tensors[stem].items()
    )


def test_round_trip_is_bitwise(tmp_path):
    saved = make(12)
    path = CheckpointFolder(tmp_path).save(saved)
    assert path.name == "step_00000012"
    found = read(path)
    assert equal(saved, found)
    assert (found.step, found.deciding, found.loop) == (12, saved.deciding, saved.loop)
    assert found.tensors["model"]["flag"].dtype == torch.bfloat16
    assert set(read(path, only=("model",)).tensors) == {"model"}


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (0, [1, 2, 3, 4, 5])])
def test_retention(tmp_path, keep, left):
    folder = CheckpointFolder(tmp_path, keep=keep)
    for step in range(1, 6):
        folder.save(make(step))
    assert sorted(os.listdir(tmp_path)) == [f"step_{s:08d}" for s in left]


def truncate(path):
    os.truncate(path / "model.safetensors", 40)


def flip(path):
    data = bytearray((path / "optimizer.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "optimizer.safetensors").write_bytes(data)


def lose(path):
    (path / "model.safetensors").unlink()


def no_state(path):
    (path / "state.json").unlink()


def half_state(path):
    os.truncate(path / "state.json", 30)


def other_position(path):
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"loop": {"position": 7}}))


def files_as_a_list(path):
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"files": ["model.safetensors"]}))


def new_schema(path):
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"schema": 99}))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (truncate, "model.safetensors is torn: 40 bytes"),
        (flip, "optimizer.safetensors is corrupt"),
        (lose, "model.safetensors is missing"),
        (no_state, "no state.json"),
        (half_state, "state.json is not JSON"),
        (other_position, "state.json is corrupt"),
        (files_as_a_list, "state.json is corrupt"),
        (new_schema, "schema 99"),
    ],
)
def test_a_harmed_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, harm, message):
    folder = CheckpointFolder(tmp_path)
    folder.save(make(1))
    harm(folder.save(make(2)))
    with pytest.raises(CheckpointError, match=message):
        check(tmp_path / "step_00000002")
    assert folder.latest() == tmp_path / "step_00000001"
    assert len(folder.passed_over) == 1
    folder.save(make(2, seed=5))  # the run comes by again
    assert folder.latest() == tmp_path / "step_00000002"
    assert folder.passed_over == []


def test_no_checkpoint_is_none(tmp_path):
    assert CheckpointFolder(tmp_path / "nothing").latest() is None


def test_steps_are_ordered_as_numbers(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (99_999_999, 100_000_000):
        folder.save(make(step))
    assert folder.latest() == tmp_path / "step_100000000"


def test_leftovers_of_a_killed_writer_are_swept_and_nothing_else(tmp_path):
    (tmp_path / ".step_00000003.123.tmp").mkdir()
    (tmp_path / ".step_00000003.123.tmp" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("mine")
    folder = CheckpointFolder(tmp_path)
    folder.save(make(1))
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step_00000001"]


def test_other_settings_are_named():
    saved = make(1).deciding
    require_same("x", saved, dict(saved))
    with pytest.raises(CheckpointError, match=r"optim\.lr is 0\.3.* there, 1 here"):
        require_same("x", saved, dict(saved) | {"optim.lr": 1})
    with pytest.raises(CheckpointError, match=r"new is None there, 3 here"):
        require_same("x", saved, dict(saved) | {"new": 3})


FULL_DISK = """
import resource, signal, sys
from test_training import make
from openk3.checkpoint.training import CheckpointFolder
from openk3.errors import StorageError
folder = CheckpointFolder(sys.argv[1])
folder.save(make(1))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
try:
    folder.save(make(2))
except StorageError as error:
    print(error)
"""


def test_a_disk_that_refuses_bytes_leaves_nothing_half_written(tmp_path):
    here = os.path.dirname(__file__)
    src = os.path.join(here, "../../src")
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([here, src])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cannot write" in done.stdout
    assert os.listdir(tmp_path) == ["step_00000001"]
    assert equal(read(tmp_path / "step_00000001"), make(1))


def test_too_little_room_is_said_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(StorageError, match="a checkpoint needs about"):
        CheckpointFolder(tmp_path).save(make(1))
    assert os.listdir(tmp_path) == []
