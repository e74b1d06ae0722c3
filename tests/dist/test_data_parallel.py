"""Two processes over gloo: the same step as one process, equal ranks, one writer, one stop."""

import multiprocessing

import pytest
import torch
from dist_workers import enter, open_store
from tiny_run import noisy_loss, tiny_recipe, write_tiny_data

from openk3.checkpoint import training as checkpoints

pytestmark = pytest.mark.dist


def gradients(recipe, out):
    """One step's loss, norm, gradients and next router bias, without an update."""
    from openk3.parallel.world import join
    from openk3.train.setup import build_trainer
    from openk3.train.sources import open_data

    with join("cpu") as world:
        trainer = build_trainer(recipe, open_data(recipe), world)
        trainer.prepare()
        stepper = trainer.stepper
        found = {}

        def keep(grads, norm, lr):
            found["grads"] = [g.clone() for g in grads]
            trainer.model.update_balancing(stepper._sum)
            return None, 0

        stepper._update = keep
        batches = [next(trainer.loader) for _ in range(trainer.num_micro)]
        found["result"] = stepper(batches, 0.1)
        found["bias"] = {n: b for n, b in trainer.model.named_buffers() if "correction" in n}
        torch.save(found, f"{out}.{world.rank}")


def run(recipe, folder, stop_after):
    """Train; rank 1 alone is asked to stop after a step. Saves the final weights of each rank."""
    from openk3.parallel.world import join
    from openk3.train.setup import training

    with (
        join("cpu") as world,
        training(recipe, folder, world, resume=True, loss=noisy_loss) as trainer,
    ):
        take_step = trainer.take_step

        def step():
            take_step()
            if world.rank == 1 and trainer.progress.step == stop_after:
                trainer.stop.signal = 2

        trainer.take_step = step
        finished = trainer.fit()
        torch.save((finished, trainer.stepper.masters.state()), f"{folder}.{world.rank}")


def start(rank, size, port, work, args):
    enter(rank, size, port)
    work(*args)


def launch(size, work, *args):
    store = open_store()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["openk3.train.setup"])
    processes = [
        context.Process(target=start, args=(rank, size, store.port, work, args))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [p.exitcode for p in processes] == [0] * size


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tiny_data(tmp_path_factory.mktemp("data") / "tiny")


def test_two_processes_make_the_step_of_one(data, tmp_path):
    # 7 tokens a row leave rows of unequal length, so a mean of means would be wrong
    recipe = tiny_recipe(data, data__sequence_tokens=7)
    launch(1, gradients, recipe, tmp_path / "one")
    launch(2, gradients, recipe, tmp_path / "two")
    load = lambda name: torch.load(tmp_path / name, weights_only=False)  # noqa: E731
    one, first, second = load("one.0"), load("two.0"), load("two.1")
    assert first["result"] == second["result"]
    assert first["result"].num_tokens == one["result"].num_tokens
    assert first["result"].num_bytes == one["result"].num_bytes
    assert first["result"].loss == pytest.approx(one["result"].loss, rel=1e-6)
    assert first["result"].grad_norm == pytest.approx(one["result"].grad_norm, rel=1e-5)
    for a, b, c in zip(one["grads"], first["grads"], second["grads"], strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
        assert torch.equal(b, c)
    assert len(one["bias"]) == 2
    for name, bias in one["bias"].items():
        # integer counts: the histogram does not know how the tokens were shared out
        assert torch.equal(bias, first["bias"][name])
        assert bias.any()


def test_one_rank_asked_to_stop_stops_both_and_resuming_is_bitwise(data, tmp_path):
    recipe = tiny_recipe(data, train__micro_sequences=1, train__steps=6)
    launch(2, run, recipe, tmp_path / "whole", None)
    launch(2, run, recipe, tmp_path / "stopped", 3)
    stopped = [torch.load(tmp_path / f"stopped.{r}") for r in (0, 1)]
    assert [finished for finished, _ in stopped] == [False, False]
    left = sorted(p.name for p in (tmp_path / "stopped/checkpoints").iterdir())
    assert left == ["step_00000002", "step_00000003"]
    launch(2, run, recipe, tmp_path / "stopped", None)
    ends = [torch.load(tmp_path / f"{n}.{r}") for n in ("whole", "stopped") for r in (0, 1)]
    assert all(finished for finished, _ in ends)
    for name, weight in ends[0][1].items():
        for _, other in ends[1:]:
            assert torch.equal(weight, other[name]), name
    saved = checkpoints.read(tmp_path / "stopped/checkpoints/step_00000006")
    for name, weight in ends[0][1].items():
        assert torch.equal(weight, saved.tensors["model"][name])
