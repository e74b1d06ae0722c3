"""A run's model loads by itself and says what the trainer's says."""

import pytest
import torch

from openk3.checkpoint.trained import is_training_output, load_trained
from openk3.checkpoint.training import CheckpointFolder, read
from openk3.errors import CheckpointError
from openk3.model.init import keeps_float32
from openk3.parallel.world import World
from openk3.train.setup import training
from tiny_run import tiny_recipe, write_tiny_data


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    base = tmp_path_factory.mktemp("trained")
    recipe = tiny_recipe(write_tiny_data(base / "data"), train__steps=3)
    with training(recipe, base / "run", World()) as trainer:
        trainer.fit()
    return base / "run", trainer


def test_logits_equal_the_trainers(run):
    folder, trainer = run
    ids = torch.arange(12).view(1, 12) + 97
    trainer.model.eval()
    for path in (folder, folder / "checkpoints/step_00000003"):
        assert is_training_output(path)
        found = load_trained(path)
        assert (found.step, found.model.config) == (3, trainer.recipe.model)
        assert not found.model.training
        with torch.no_grad():
            assert torch.equal(found.model(ids), trainer.model(ids))


def test_bfloat16_spares_what_stays_float32(run):
    model = load_trained(run[0], dtype=torch.bfloat16).model
    for name, p in model.named_parameters():
        assert p.dtype == (torch.float32 if keeps_float32(name) else torch.bfloat16)


def test_no_checkpoint_and_no_run_are_told(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="holds no whole checkpoint; train first"):
        load_trained(tmp_path)
    assert not is_training_output(tmp_path / "nowhere")


def test_weights_of_another_shape_are_named(run, tmp_path):
    saved = read(run[0] / "checkpoints/step_00000002")
    saved.loop["model"]["text_config"]["intermediate_size"] = 64
    copy = CheckpointFolder(tmp_path).save(saved)
    with pytest.raises(CheckpointError, match=r"does not fit its own config[\s\S]*gate_proj"):
        load_trained(copy)
