"""Training that starts from the weights of a model: any folder, any layout, once."""

import dataclasses
import shutil

import pytest
import torch

import openk3
from openk3.errors import CheckpointError, ConfigError
from openk3.model.k3 import K3
from openk3.parallel.world import World
from openk3.train.setup import training
from tiny_run import tiny_config, tiny_recipe


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder in the published layout whose router biases are not the initial ones."""
    model = K3(tiny_config(), seed=7)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1)))
    folder = tmp_path_factory.mktemp("models") / "published"
    openk3.save(model, folder)
    return folder, model.state_dict()


def start(recipe, folder, **options):
    with training(recipe, folder, World(), **options) as trainer:
        first = {n: t.clone() for n, t in trainer.stepper.masters.state().items()}
        trainer.fit()
    return first, trainer


def test_it_starts_from_the_published_layout_and_goes_on_without_it(data, source, tmp_path):
    folder, want = source
    copy = shutil.copytree(folder, tmp_path / "copy")
    recipe = tiny_recipe(data, train__start_from=str(copy), train__steps=4, run__stop_after=2)
    first, _ = start(recipe, tmp_path / "run")
    assert first.keys() == want.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, want[name]), name

    shutil.rmtree(copy)
    run = dataclasses.replace(recipe.run, stop_after=0)
    moved, trainer = start(dataclasses.replace(recipe, run=run), tmp_path / "run", resume=True)
    assert trainer.progress.step == 4
    assert not torch.equal(moved["lm_head.weight"], want["lm_head.weight"])


def test_four_bit_experts_become_masters(data, tmp_path):
    wide = tiny_config().replace(moe_intermediate_size=32, routed_expert_hidden_size=32)
    openk3.save(K3(wide, seed=3), tmp_path / "four-bit", mxfp4_experts=True)
    want = openk3.load(tmp_path / "four-bit", dtype=torch.float32).state_dict()
    recipe = tiny_recipe(data, train__start_from=str(tmp_path / "four-bit"), train__steps=1)
    recipe = dataclasses.replace(recipe, model=wide)
    first, _ = start(recipe, tmp_path / "run")
    for name, tensor in first.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, want[name]), name


def test_a_run_starts_from_another_run(data, tmp_path):
    _, before = start(tiny_recipe(data, train__steps=2), tmp_path / "before")
    recipe = tiny_recipe(data, train__start_from=str(tmp_path / "before"), train__steps=2)
    first, after = start(recipe, tmp_path / "after")
    for name, tensor in before.stepper.masters.state().items():
        assert torch.equal(first[name], tensor), name
    assert after.progress.step == 2


def test_another_model_is_refused_before_anything_is_written(data, source, tmp_path):
    recipe = tiny_recipe(data, train__start_from=str(source[0]))
    other = recipe.model.replace(activation_situ_beta=3.0, num_experts=16)
    recipe = dataclasses.replace(recipe, model=other)
    with pytest.raises(
        ConfigError, match=r"model.num_experts is 8 there and 16 here; model.activation_situ"
    ):
        start(recipe, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        start(tiny_recipe(data, train__start_from=str(tmp_path)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
