"""Killed with SIGKILL at any moment and resumed, a run ends bitwise as if unharmed.

Each attempt is a real process that kills itself at an exact point: in the middle of a step, in the
middle of a checkpoint's file, between its files, before and after the rename that makes it count,
and while an old one is being removed.
"""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from openk3.checkpoint import training as checkpoints
from openk3.obs.metrics import read_rows
from tiny_run import noisy_loss, tiny_recipe, write_tiny_data


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def arm(trainer, where, nth):
    """Make the process die at the nth occurrence of an event."""
    count = 0

    def strike(original, before):
        def wrapped(*args, **options):
            nonlocal count
            count += 1
            if count < nth:
                return original(*args, **options)
            if not before:
                original(*args, **options)
            return die()

        return wrapped

    def torn(file, tensors):
        nonlocal count
        count += 1
        write_tensors(file, tensors)
        if count == nth:
            os.truncate(file, file.stat().st_size // 2)
            die()

    write_tensors = checkpoints._write_tensors
    if where == "step":
        trainer.stepper.masters.publish = strike(trainer.stepper.masters.publish, True)
    elif where == "torn":
        checkpoints._write_tensors = torn
    elif where == "written":
        checkpoints._write_tensors = strike(write_tensors, False)
    elif where == "before rename":
        os.rename = strike(os.rename, True)
    elif where == "after rename":
        os.rename = strike(os.rename, False)
    elif where == "removal":
        checkpoints.shutil.rmtree = half_removed(nth)


def half_removed(nth):
    """Die with half of an old checkpoint removed."""
    import shutil

    count, remove = 0, shutil.rmtree

    def rmtree(path, **options):
        nonlocal count
        path = Path(path)
        count += path.exists()
        if path.exists() and count == nth:
            os.unlink(path / "model.safetensors")
            die()
        remove(path, **options)

    return rmtree


def attempt(data, folder, where, nth):
    from openk3.parallel.world import World
    from openk3.train.setup import training

    torch.set_num_threads(1)
    recipe = tiny_recipe(Path(data))
    with training(recipe, folder, World(), resume=True, loss=noisy_loss) as trainer:
        if where:
            arm(trainer, where, nth)
        trainer.fit()


# checkpoints come after steps 2, 4 and 6 and at the end, 8; two are kept
KILLS = [
    ("step", 1),
    ("torn", 1),
    ("written", 1),
    ("before rename", 1),
    ("after rename", 1),
    ("step", 2),
    ("torn", 2),
    ("removal", 1),
    ("step", 1),
    ("written", 2),
    ("after rename", 1),
]


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["openk3.train.setup"])

    def start(*args):
        process = context.Process(target=attempt, args=args)
        process.start()
        process.join(120)
        assert not process.is_alive()
        return process.exitcode

    return start


def final(folder):
    path = checkpoints.CheckpointFolder(folder / "checkpoints").latest()
    assert path is not None
    return checkpoints.read(path)


def test_killed_again_and_again_it_ends_bitwise_the_same(tmp_path, processes):
    data = write_tiny_data(tmp_path / "data")
    assert processes(str(data), str(tmp_path / "whole"), None, 0) == 0
    killed = 0
    for where, nth in KILLS:
        code = processes(str(data), str(tmp_path / "killed"), where, nth)
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
    assert killed >= 9
    assert processes(str(data), str(tmp_path / "killed"), None, 0) == 0
    want, found = final(tmp_path / "whole"), final(tmp_path / "killed")
    assert found.step == want.step == 8
    for stem, tensors in want.tensors.items():
        assert set(tensors) == set(found.tensors[stem])
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found.tensors[stem][name]), name
    for key in ("position", "guard"):
        assert found.loop[key] == want.loop[key]
    left = sorted(os.listdir(tmp_path / "killed/checkpoints"))
    assert left[-2:] == ["step_00000006", "step_00000008"]
    assert not any(name.startswith(".") for name in left)
    losses = [
        [r["loss"] for r in read_rows(tmp_path / name / "metrics.jsonl") if r["kind"] == "step"]
        for name in ("whole", "killed")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8
