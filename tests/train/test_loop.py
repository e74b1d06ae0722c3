"""The loop on a tiny model: it learns, logs, evaluates, skips, stops and starts again."""

import dataclasses
import math
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from openk3.checkpoint import training as checkpoints
from openk3.checkpoint.training import read
from openk3.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    InputError,
    StorageError,
)
from openk3.obs import sinks
from openk3.obs.metrics import read_rows
from openk3.parallel.world import World
from openk3.train.setup import build_trainer, training
from openk3.train.sources import open_data
from openk3.train.step import next_token_loss
from tiny_run import VOCAB, noisy_loss, tiny_config, tiny_recipe, write_tiny_data


def run(recipe, folder, **options):
    with training(recipe, folder, World(), **options) as trainer:
        finished = trainer.fit()
    return trainer, finished


def rows(folder, kind):
    return [r for r in read_rows(folder / "metrics.jsonl") if r["kind"] == kind]


@pytest.fixture(scope="module")
def finished_run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    trainer, finished = run(tiny_recipe(data, train__steps=40, optim__lr=2e-2), folder)
    assert finished
    return folder, trainer


def test_it_learns(finished_run):
    folder, trainer = finished_run
    losses = [r["loss"] for r in rows(folder, "step")]
    assert len(losses) == 40
    assert losses[0] == pytest.approx(math.log(VOCAB), rel=0.05)
    assert losses[-1] < losses[0] - 1.5
    evaluations = rows(folder, "eval")
    assert [r["step"] for r in evaluations] == list(range(4, 41, 4))
    assert evaluations[-1]["bits_per_byte"] < evaluations[0]["bits_per_byte"] - 1
    assert trainer.last_evaluation.bits_per_byte == evaluations[-1]["bits_per_byte"]


def test_rows_carry_tokens_and_insides(finished_run):
    folder, trainer = finished_run
    last = rows(folder, "step")[-1]
    assert last["tokens"] <= 40 * 4 * 32
    assert last["tokens"] == trainer.progress.tokens
    assert last["flops"] == pytest.approx(last["tokens"] * trainer.journal.flops_per_token)
    assert last["max_logit"] is not None
    balance = rows(folder, "balance")
    assert {r["layer"] for r in balance} == {1, 2}
    since = [r for r in balance if r["layer"] == 1 and r["step"] in (1, 3, 6)]
    steps = {r["step"]: r["tokens"] for r in rows(folder, "step")}
    # loads of every step since the last row, top-2 of each token
    assert [sum(r["load"]) for r in since] == [
        2 * steps[1],
        2 * (steps[3] - steps[1]),
        2 * (steps[6] - steps[3]),
    ]
    assert rows(folder, "attn_res")
    assert {r["layer"] for r in rows(folder, "decay")} == {0, 1}
    assert rows(folder, "event")[-1]["what"] == "done"


def test_checkpoints_are_kept_in_number(finished_run):
    folder, _ = finished_run
    assert sorted(os.listdir(folder / "checkpoints")) == ["step_00000038", "step_00000040"]


def test_observation_evaluation_and_checkpoints_change_no_number(data, tmp_path):
    plain = tiny_recipe(
        data, run__observe_every=0, run__eval_every=0, run__checkpoint_every=0, train__steps=5
    )
    busy = tiny_recipe(
        data, run__observe_every=1, run__eval_every=1, run__checkpoint_every=1, train__steps=5
    )
    a, _ = run(plain, tmp_path / "a", loss=noisy_loss)
    b, _ = run(busy, tmp_path / "b", loss=noisy_loss)
    for name, w in a.stepper.masters.state().items():
        assert torch.equal(w, b.stepper.masters.state()[name]), name


def test_accumulation_is_a_mean_over_tokens(data):
    whole = build_trainer(
        tiny_recipe(data, train__micro_sequences=4), open_data(tiny_recipe(data)), World()
    )
    pieces = build_trainer(
        tiny_recipe(data, train__micro_sequences=1), open_data(tiny_recipe(data)), World()
    )
    found = []
    for trainer in (whole, pieces):
        trainer.model.train()
        batches = [next(trainer.loader) for _ in range(trainer.num_micro)]
        tokens = sum(b.num_tokens for b in batches)
        loss = trainer.stepper._gradients(batches, tokens, None)
        found.append((len(batches), tokens, loss, trainer.stepper.masters.grads()))
    assert [f[0] for f in found] == [1, 4]
    assert found[0][1] == found[1][1]
    torch.testing.assert_close(found[0][2], found[1][2])
    for a, b in zip(found[0][3], found[1][3], strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-4)


def test_bfloat16_compute_follows_float32_and_resumes_bitwise(data, tmp_path):
    change = {"train__steps": 6, "optim__lr": 1e-2, "run__checkpoint_every": 3}
    low = tiny_recipe(data, train__compute_dtype="bfloat16", **change)
    run(tiny_recipe(data, **change), tmp_path / "full")
    whole, _ = run(low, tmp_path / "low")
    losses = [[r["loss"] for r in rows(tmp_path / n, "step")] for n in ("full", "low")]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[1] != losses[0]
    shutil.rmtree(tmp_path / "low/checkpoints/step_00000006")
    again, _ = run(low, tmp_path / "low", resume=True)
    for name, w in whole.stepper.masters.state().items():
        assert torch.equal(w, again.stepper.masters.state()[name]), name
    for name, p in again.model.named_parameters():
        assert torch.equal(p, again.stepper.masters.weights[name].to(p.dtype)), name


def test_a_disk_that_fills_up_stops_the_run_and_keeps_the_older_checkpoint(
    data, tmp_path, monkeypatch
):
    def refuse(file, tensors, write=checkpoints._write_tensors):
        if "step_00000004" in str(file):
            raise OSError(28, "No space left on device")
        write(file, tensors)

    monkeypatch.setattr(checkpoints, "_write_tensors", refuse)
    with pytest.raises(StorageError, match="step_00000004: No space left on device"):
        run(tiny_recipe(data), tmp_path / "r")
    assert os.listdir(tmp_path / "r/checkpoints") == ["step_00000002"]
    monkeypatch.undo()
    trainer, finished = run(tiny_recipe(data), tmp_path / "r", resume=True)
    assert finished
    assert [r["step"] for r in rows(tmp_path / "r", "step")] == list(range(1, 9))
    assert trainer.progress.step == 8


class Bad:
    """next_token_loss that is poisoned at some calls."""

    def __init__(self, calls):
        self.calls, self.count = calls, 0

    def __call__(self, model, batch, probe=None):
        self.count += 1
        loss = next_token_loss(model, batch, probe)
        return loss * float("nan") if self.count in self.calls else loss


def test_a_bad_step_changes_nothing_but_the_data_position(data, tmp_path, caplog):
    recipe = tiny_recipe(data, train__micro_sequences=4, train__steps=3)
    with training(recipe, tmp_path / "r", World(), loss=Bad({2})) as trainer:
        seen = []
        stepper = trainer.stepper

        def watch(*args, call=stepper, **options):
            before = {n: t.clone() for n, t in stepper.masters.state().items()}
            before |= {n: t.clone() for n, t in stepper.optimizer.state().items()}
            result = call(*args, **options)
            after = stepper.masters.state() | stepper.optimizer.state()
            seen.append((result.bad, all(torch.equal(before[n], after[n]) for n in before)))
            for router in trainer.model.routers().values():
                assert not router.margin_counts.any()
            return result

        trainer.stepper = watch
        watch.guard = stepper.guard
        watch.masters, watch.optimizer = stepper.masters, stepper.optimizer
        assert trainer.fit()
    assert [s[0] for s in seen] == [None, "loss is nan", None]
    assert [s[1] for s in seen] == [False, True, False]
    bad = rows(tmp_path / "r", "step")[1]
    assert bad["bad"] == "loss is nan"
    assert bad["loss"] is None
    assert "SKIPPED: loss is nan" in (tmp_path / "r/logs/attempt_1.log").read_text()
    assert [r["what"] for r in rows(tmp_path / "r", "event")].count("skip") == 1
    assert trainer.loader.position == 3 * 4


def test_too_many_bad_steps_stop_the_run_before_a_checkpoint_of_them(data, tmp_path):
    recipe = tiny_recipe(data, train__micro_sequences=4, train__max_bad_steps=3)
    with (
        pytest.raises(DivergedError, match="3 steps in a row"),
        training(recipe, tmp_path / "r", World(), loss=Bad({3, 4, 5})) as trainer,
    ):
        trainer.fit()
    assert rows(tmp_path / "r", "event")[-1]["what"] == "diverged"
    assert trainer.progress.step == 5


def test_a_wish_to_stop_saves_and_resuming_ends_bitwise_the_same(data, tmp_path):
    recipe = tiny_recipe(data)
    whole, _ = run(recipe, tmp_path / "whole", loss=noisy_loss)
    with training(recipe, tmp_path / "r", World(), loss=noisy_loss) as trainer:
        step = trainer.take_step

        def stop_after_three():
            step()
            if trainer.progress.step == 3:
                trainer.stop.signal = 2

        trainer.take_step = stop_after_three
        assert not trainer.fit()
    assert (tmp_path / "r/checkpoints/step_00000003").is_dir()
    assert [r["what"] for r in rows(tmp_path / "r", "event")][-1] == "interrupt"
    resumed, finished = run(recipe, tmp_path / "r", loss=noisy_loss, resume=True)
    assert finished
    for name, w in whole.stepper.masters.state().items():
        assert torch.equal(w, resumed.stepper.masters.state()[name]), name
    assert [r["step"] for r in rows(tmp_path / "r", "step")] == list(range(1, 9))
    assert resumed.progress.tokens == whole.progress.tokens


def test_resuming_a_finished_run_does_nothing(finished_run, data):
    folder, _ = finished_run
    before = (folder / "checkpoints/step_00000040/state.json").read_bytes()
    trainer, finished = run(tiny_recipe(data, train__steps=40, optim__lr=2e-2), folder, resume=True)
    assert finished
    assert trainer.progress.step == 40
    assert (folder / "checkpoints/step_00000040/state.json").read_bytes() == before


def test_resume_into_nothing_starts(data, tmp_path):
    trainer, _ = run(tiny_recipe(data, train__steps=1), tmp_path / "new", resume=True)
    assert trainer.progress.step == 1


def everything(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("change", "resume", "error", "message"),
    [
        ({}, False, StorageError, "already holds a run: pass --resume auto"),
        ({"optim__lr": 1e-3}, True, CheckpointError, r"optim.lr is 0.02 there, 0.001 here"),
        ({"train__steps": 50}, True, CheckpointError, r"train.steps is 40 there, 50 here"),
    ],
)
def test_another_runs_folder_is_refused_untouched(
    finished_run, data, change, resume, error, message
):
    folder, _ = finished_run
    before = everything(folder)
    recipe = tiny_recipe(data, **({"train__steps": 40, "optim__lr": 2e-2} | change))
    with pytest.raises(error, match=message):
        run(recipe, folder, resume=resume)
    assert everything(folder) == before


def test_other_data_is_refused_untouched(finished_run, tmp_path):
    folder, _ = finished_run
    other = write_tiny_data(tmp_path / "other", num_documents=30)
    before = everything(folder)
    with pytest.raises(CheckpointError, match=r"data.fingerprint"):
        run(tiny_recipe(other, train__steps=40, optim__lr=2e-2), folder, resume=True)
    assert everything(folder) == before


def test_a_folder_with_other_files_is_refused(data, tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"x")
    with pytest.raises(StorageError, match="not empty"):
        run(tiny_recipe(data), tmp_path)
    assert os.listdir(tmp_path) == ["photo.jpg"]


def test_trackers_receive_the_rows_of_every_attempt(data, tmp_path, monkeypatch):
    sent = []
    fake = SimpleNamespace(log=lambda row: sent.append((row["kind"], row["step"])), close=list)
    monkeypatch.setitem(sinks.SINKS, "tensorboard", lambda *_: fake)
    monkeypatch.setitem(sys.modules, "tensorboard", SimpleNamespace())
    recipe = tiny_recipe(data, train__steps=2, run__trackers=("tensorboard",))
    run(recipe, tmp_path / "run")
    assert [step for kind, step in sent if kind == "step"] == [1, 2]


def test_a_tracker_that_is_not_there_is_said_before_the_folder_is_made(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(BackendError, match=r"openk3\[track\]"):
        run(tiny_recipe(data, run__trackers=("wandb",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_room_is_said_before_the_folder_is_made(data, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(StorageError, match="this run with its checkpoints needs about"):
        run(tiny_recipe(data), tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data__train": ()}, "data.train names no dataset"),
        ({"data__eval_split": "valid"}, "no split 'valid' to evaluate on.*--held-out"),
        ({"data__weights": (1.0, 2.0)}, "2 numbers for 1 datasets"),
        ({"train__micro_sequences": 3}, "must divide a process's share of 4"),
        ({"model": 200}, "vocabulary of 300, larger than the model's vocab_size"),
        ({"data__sequence_tokens": 2_000_000}, "exceeds the model's limit"),
    ],
)
def test_settings_that_cannot_work(data, tmp_path, change, message):
    if "model" in change:
        small = tiny_config().replace(
            vocab_size=200,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=3,
            media_placeholder_token_id=4,
        )
        recipe = dataclasses.replace(tiny_recipe(data), model=small)
    else:
        recipe = tiny_recipe(data, **change)
    with pytest.raises(ConfigError, match=message):
        run(recipe, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_without_a_split_there_is_no_evaluation(data, tmp_path):
    trainer, _ = run(tiny_recipe(data, data__eval_split="", train__steps=4), tmp_path / "r")
    assert trainer.last_evaluation is None
    assert rows(tmp_path / "r", "eval") == []


def test_no_dataset_there(tmp_path):
    with pytest.raises(DataError, match="not a token dataset"):
        run(tiny_recipe(tmp_path / "nowhere"), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_ids_out_of_range_are_named(data):
    trainer = build_trainer(tiny_recipe(data), open_data(tiny_recipe(data)), World())
    batch = next(trainer.loader)
    batch.input_ids[0, 3] = VOCAB + 7
    with pytest.raises(InputError, match=f"token id {VOCAB + 7}"):
        trainer.stepper([batch], 0.1)


def test_checkpoint_is_of_masters_and_buffers(finished_run):
    folder, trainer = finished_run
    saved = read(folder / "checkpoints/step_00000040")
    assert set(saved.tensors["model"]) == set(trainer.model.state_dict())
    assert set(saved.tensors["optimizer"]) == set(trainer.stepper.optimizer.state())
    assert saved.loop["position"] == 40 * 4
