"""Training that starts from the weights of a model: any folder, any layout, once."""

import dataclasses
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import openk3
from openk3.checkpoint.hf.folder import open_folder
from openk3.checkpoint.start import require_same_model
from openk3.config.model import VisionConfig
from openk3.errors import CheckpointError, ConfigError
from openk3.model.k3 import K3
from openk3.parallel.world import World
from openk3.text.train_tokenizer import train
from openk3.train.begin import require_same_tokenizer
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
        ConfigError,
        match=r"model.activation_situ_beta is 4.0 there, 3.0 here; model.num_experts is 8 there",
    ):
        start(recipe, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        start(tiny_recipe(data, train__start_from=str(tmp_path)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_nextn_predict_layers": 1}, "model.num_nextn_predict_layers is 0 there, 1 here"),
        (
            {"vision": VisionConfig(text_hidden_size=32)},
            "model.vision is None there, 'a tower' here",
        ),
        ({"head_dim": 8}, "model.linear_attn.head_dim is 16 there, 8 here"),
    ],
)
def test_what_differs_is_named_and_nothing_else(source, changes, told):
    config = tiny_config()
    if "head_dim" in changes:
        changes = {"linear_attn": dataclasses.replace(config.linear_attn, **changes)}
    with pytest.raises(ConfigError) as caught:
        require_same_model(open_folder(source[0]), config.replace(**changes))
    assert str(caught.value).endswith(f"does not hold the model of this recipe: {told}")


def test_a_start_that_cannot_be_read_says_why(data, source, tmp_path):
    def refused(folder, error=CheckpointError):
        with pytest.raises(error) as caught:
            start(tiny_recipe(data, train__start_from=str(folder)), tmp_path / "run")
        assert not (tmp_path / "run").exists()
        return str(caught.value)

    assert refused(tmp_path / "nowhere").endswith("is no model folder: it is no folder")
    assert refused(source[0] / "config.json").endswith("is no model folder: it is no folder")
    shutil.copytree(source[0], tmp_path / "nan")
    shard = next((tmp_path / "nan").glob("*.safetensors"))
    tensors = load_file(shard)
    name = next(n for n in tensors if "lm_head" in n)
    tensors[name][3, 5] = torch.nan
    save_file(tensors, shard)
    assert refused(tmp_path / "nan").endswith(f"{name} holds values that are NaN or infinite")
    start(tiny_recipe(data, train__steps=1), tmp_path / "torn")
    weights = tmp_path / "torn/checkpoints/step_00000001/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert "torn holds no whole checkpoint: " in (told := refused(tmp_path / "torn"))
    assert "model.safetensors is torn" in told


def test_rows_of_another_tokenizer_are_refused(tmp_path, source):
    texts = ["the first text of all, and more of it " * 9, "another text. What else? zebra " * 9]
    for name, text in zip("ab", texts, strict=True):
        train([text], 300, path=tmp_path / name)
    data = SimpleNamespace(path=tmp_path / "data", tokenizer_path=tmp_path / "b/tokenizer.json")
    require_same_tokenizer(tmp_path / "b", data)
    require_same_tokenizer(source[0], data)  # it has none
    with pytest.raises(ConfigError, match=r"another tokenizer than .*data: token 2\d\d is b'"):
        require_same_tokenizer(tmp_path / "a", data)
