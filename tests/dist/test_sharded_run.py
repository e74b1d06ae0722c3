"""Sharded runs: their files load into any layout, and what is resumed goes on as one process."""

import dataclasses
import os

import pytest
import torch
from dist_workers import crew
from tiny_run import tiny_recipe, write_tiny_data

import openk3
from openk3.checkpoint import training as checkpoints
from openk3.checkpoint.bridge import to_training
from openk3.checkpoint.convert import convert, verify
from openk3.checkpoint.hf.save import Target
from openk3.checkpoint.sharded import Box, fill
from openk3.config.recipe import ParallelRecipe
from openk3.errors import CheckpointError
from openk3.obs.metrics import read_rows
from openk3.parallel.world import World
from openk3.train.setup import build_whole

pytestmark = pytest.mark.dist

FOUR = ParallelRecipe(zero=3, expert=4)
TWO = ParallelRecipe(zero=1, expert=2)
STEPS = 6


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    data = write_tiny_data(tmp_path_factory.mktemp("data") / "tiny")
    return tiny_recipe(data, train__steps=STEPS, train__micro_sequences=1)


def run(world, recipe, folder, stop_after=None):
    """Train or go on; the last process alone is asked to stop."""
    from openk3.train.setup import training

    with training(recipe, folder, world, resume=True) as trainer:
        take_step = trainer.take_step

        def step():
            take_step()
            if world.rank == world.size - 1 and trainer.progress.step == stop_after:
                trainer.stop.signal = 2

        trainer.take_step = step
        return trainer.fit()


def on(recipe, parallel):
    return dataclasses.replace(recipe, parallel=parallel)


def losses(folder):
    return [r["loss"] for r in read_rows(folder / "metrics.jsonl") if r["kind"] == "step"]


@pytest.fixture(scope="module")
def alone(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "alone"
    assert run(World(), recipe, folder)
    return folder


@pytest.mark.parametrize(
    "stages",
    [
        [(4, FOUR, 3), (4, TWO, None)],
        [(4, TWO, 2), (2, ParallelRecipe(zero=2, expert=2), 4), (1, ParallelRecipe(), None)],
        [(1, ParallelRecipe(), 3), (4, ParallelRecipe(zero=3, replicate=2), None)],
    ],
    ids=["experts of 4 then 2", "4 processes, 2, 1", "1 process then 4"],
)
def test_any_layout_goes_on_from_any_other(recipe, alone, tmp_path, stages):
    for size, parallel, stop_after in stages:
        if size == 1:
            finished = [run(World(), on(recipe, parallel), tmp_path / "r", stop_after)]
        else:
            args = (on(recipe, parallel), tmp_path / "r", stop_after)
            finished = crew(size).run(run, *args)
        assert finished == [stop_after is None] * size
    assert losses(tmp_path / "r") == pytest.approx(losses(alone), rel=1e-4)
    want = checkpoints.read(alone / f"checkpoints/step_{STEPS:08d}")
    found = checkpoints.read(tmp_path / f"r/checkpoints/step_{STEPS:08d}")
    for part, tensors in want.tensors.items():
        assert found.tensors[part].keys() == tensors.keys()
        for name, tensor in tensors.items():
            scale = tensor.double().norm().clamp(min=1e-3)
            off = (found.tensors[part][name].double() - tensor).norm() / scale
            assert off < 2e-3, (name, float(off))
    assert {k: found.loop[k] for k in ("model", "position")} == {
        k: want.loop[k] for k in ("model", "position")
    }


def test_resuming_in_the_same_layout_is_bitwise(recipe, tmp_path):
    plain = on(recipe, FOUR)
    assert all(crew(4).run(run, plain, tmp_path / "whole", None))
    assert not any(crew(4).run(run, plain, tmp_path / "stopped", 3))
    left = sorted(os.listdir(tmp_path / "stopped/checkpoints"))
    assert left == ["step_00000002", "step_00000003"]
    assert all(crew(4).run(run, plain, tmp_path / "stopped", None))
    ends = [
        checkpoints.read(tmp_path / f"{n}/checkpoints/step_{STEPS:08d}").tensors
        for n in ("whole", "stopped")
    ]
    for part, tensors in ends[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, ends[1][part][name]), name
    assert losses(tmp_path / "whole") == losses(tmp_path / "stopped")
    rows = [r["kind"] for r in read_rows(tmp_path / "stopped/metrics.jsonl")]
    events = [r for r in read_rows(tmp_path / "stopped/metrics.jsonl") if r["kind"] == "event"]
    assert sum(e["what"] == "checkpoint" for e in events) == 4  # after steps 2, 3, 4 and 6
    assert "eval" in rows


def rows_from(world, recipe, path):
    """The weights that a process takes from a checkpoint, as (first row, whole shape, rows)."""
    from openk3.checkpoint.sharded import fill
    from openk3.train.sharded import build_sharded

    masters, optimizer = build_sharded(recipe, world)
    model = masters.boxes(optimizer)["model"]
    fill(path, {"model": model})
    return {n: (box.start, box.shape, box.rows.detach().cpu()) for n, box in model.items()}


def test_to_the_published_layout_and_back(recipe, tmp_path):
    crew(4).run(run, on(recipe, FOUR), tmp_path / "r", 2)
    saved = checkpoints.read(tmp_path / "r/checkpoints/step_00000002").tensors["model"]
    found = convert(tmp_path / "r", tmp_path / "hf", Target(dtype="F32", expert_ranks=2))
    assert len(found.entries) == len(saved)
    assert verify(tmp_path / "r", tmp_path / "hf").max_difference == 0
    for name, tensor in openk3.load(tmp_path / "hf").state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    back = to_training(tmp_path / "hf", tmp_path / "back")
    for rows in crew(4).run(rows_from, on(recipe, TWO), back):
        for name, (start, shape, here) in rows.items():
            assert shape == saved[name].shape
            assert torch.equal(here, saved[name][start : start + len(here)]), name

    start = dataclasses.replace(recipe.train, start_from=str(tmp_path / "hf"), steps=2)
    again = dataclasses.replace(recipe, train=start)
    assert run(World(), again, tmp_path / "one")
    assert all(crew(4).run(run, on(again, FOUR), tmp_path / "four"))
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_a_checkpoint_of_another_model_is_refused(recipe, tmp_path):
    crew(4).run(run, on(recipe, FOUR), tmp_path / "r", 2)
    path = tmp_path / "r/checkpoints/step_00000002"
    masters, optimizer = build_whole(on(recipe, ParallelRecipe()), World())
    boxes = {n: Box.whole(t) for n, t in masters.state().items()}
    name = "layers.1.block_sparse_moe.experts.w1"
    with pytest.raises(CheckpointError, match=r"1 tensors differ, first 'norm.weight'"):
        fill(path, {"model": {n: b for n, b in boxes.items() if n != "norm.weight"}})
    boxes[name] = Box(boxes[name].rows[:, :8].clone(), (8, 8, 16))
    with pytest.raises(CheckpointError, match=r"w1' with shape \[8, 16, 16\]; .* \[8, 8, 16\]"):
        fill(path, {"model": boxes})
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is torn"):
        checkpoints.read(path)
