"""Processes that die, freeze, hang or fail: the others say which, and the files stay whole."""

import dataclasses
import errno
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from dist_workers import Crew
from tiny_run import tiny_recipe, write_tiny_data

from openk3.checkpoint import training as checkpoints
from openk3.config.recipe import ParallelRecipe

pytestmark = pytest.mark.dist

STEPS = 4
HANG_SECONDS = 3


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    data = write_tiny_data(tmp_path_factory.mktemp("data") / "tiny")
    plain = tiny_recipe(
        data, train__steps=STEPS, train__micro_sequences=1, run__hang_seconds=HANG_SECONDS
    )
    return dataclasses.replace(plain, parallel=ParallelRecipe(zero=3, expert=2))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)


def hang():
    time.sleep(1000)


def fail():
    raise ValueError("no such luck")


def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def before(original, nth, what):
    """`original`, but `what` happens at its nth call, before it."""
    count = 0

    def wrapped(*args, **options):
        nonlocal count
        count += 1
        if count == nth:
            what()
        return original(*args, **options)

    return wrapped


def run(world, recipe, folder, trouble=None):
    """Train or go on; `trouble` is (rank, place, nth time, what happens)."""
    from torch.distributed.checkpoint import FileSystemWriter

    from openk3.obs import log
    from openk3.train import setup
    from openk3.train.setup import training

    if trouble is not None and trouble[1] == "start":
        log.setup(Path(f"{folder}/rank_{world.rank}.log"))
        if trouble[0] == world.rank:
            setup.open_data = before(setup.open_data, *trouble[2:])
    with training(recipe, folder, world, resume=True) as trainer:
        if trouble is not None and trouble[0] == world.rank:
            _, place, nth, what = trouble
            stepper = trainer.stepper
            if place == "backward":
                stepper.loss = before(stepper.loss, nth, what)
            elif place == "update":
                stepper.optimizer.step = before(stepper.optimizer.step, nth, what)
            elif place == "files":
                write = before(FileSystemWriter.write_data, nth, what)
                FileSystemWriter.write_data = write
            elif place == "rename":
                folder = trainer.sharded.folder
                folder.publish = before(folder.publish, nth, what)
        return trainer.fit()


def told(recipe, folder, *trouble):
    """What the crew said before it ended, and how long that took."""
    crew = Crew(2)
    started = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        crew.run(run, recipe, folder, trouble)
    logs = [*Path(folder).glob("rank_*.log"), *Path(folder).glob("logs/attempt_1.log")]
    text = "".join(log.read_text() for log in logs)
    return str(caught.value) + text, time.monotonic() - started


def test_a_killed_process_is_named(recipe, tmp_path):
    text, _ = told(recipe, tmp_path / "r", 1, "backward", 3, die)
    # two micro-batches a step, so the third forward pass is step 2's first
    assert "LostProcessError: rank 1 died or is frozen" in text
    assert "was last in step 2, phase forward and backward" in text


def test_a_frozen_process_is_named_in_time(recipe, tmp_path):
    text, seconds = told(recipe, tmp_path / "r", 1, "update", 2, freeze)
    assert "ends: rank 1 died or is frozen" in text
    assert "was last in step 2, phase update" in text
    assert seconds < 40


def test_a_hanging_process_is_named_in_time(recipe, tmp_path):
    text, seconds = told(recipe, tmp_path / "r", 1, "update", 3, hang)
    assert f"no progress for {HANG_SECONDS} s (run.hang_seconds): rank 1 hangs in " in text
    assert "rank 1 hangs in step 3, phase update, at test_faults.py" in text
    assert seconds < 40


def test_a_failing_process_is_named_with_its_error(recipe, tmp_path):
    text, _ = told(recipe, tmp_path / "r", 1, "backward", 1, fail)
    reason = "rank 1 failed in step 1, phase forward and backward: ValueError: no such luck"
    assert f"ends: {reason}" in text
    assert "ValueError: no such luck" in text


@pytest.mark.parametrize(
    ("what", "told_of"),
    [
        (freeze, "rank 1 died or is frozen: it has not been heard of for "),
        (fail, "rank 1 failed in step 0, phase opening the data: ValueError: no such luck"),
    ],
)
def test_the_start_is_watched_too(recipe, tmp_path, what, told_of):
    text, seconds = told(recipe, tmp_path / "r", 1, "start", 1, what)
    assert f"rank 0, in step 0, phase opening the data, ends: {told_of}" in text
    assert seconds < 40


def test_a_disk_that_is_full_for_one_stops_all_and_keeps_the_one_before(recipe, tmp_path):
    text, _ = told(recipe, tmp_path / "r", 1, "files", 2, full)
    assert all("StorageError: cannot write" in part for part in text.split("--- rank 1"))
    assert "by rank, {1: " in text
    assert "No space left on device" in text
    assert final(tmp_path / "r").step == 2


@pytest.fixture(scope="module")
def unharmed(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    crew = Crew(2)
    assert crew.run(run, recipe, folder) == [True, True]
    crew.close()
    return final(folder)


def final(folder):
    path = checkpoints.CheckpointFolder(folder / "checkpoints").latest()
    return path and checkpoints.read(path)


# checkpoints are begun after step 2 and after step 4, the last
@pytest.mark.parametrize(
    ("trouble", "last"),
    [
        ((1, "files", 1, die), None),
        ((0, "files", 2, die), 2),
        ((0, "rename", 2, die), 2),
    ],
)
def test_killed_while_saving_the_one_before_loads_and_the_end_is_bitwise_the_same(
    recipe, unharmed, tmp_path, trouble, last
):
    folder = tmp_path / "r"
    told(recipe, folder, *trouble)
    found = final(folder)
    assert (found and found.step) == last
    crew = Crew(2)
    assert crew.run(run, recipe, folder) == [True, True]
    crew.close()
    end = final(folder)
    assert end.step == unharmed.step == STEPS
    for part, tensors in unharmed.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, end.tensors[part][name]), name
    left = sorted(os.listdir(folder / "checkpoints"))
    assert left[-1] == f"step_{STEPS:08d}"
    assert not any(name.startswith(".") for name in left)
