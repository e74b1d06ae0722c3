"""Recipes: deciding fields, model overrides and their errors."""

import dataclasses

import pytest

from openk3.config import preset
from openk3.config.load import load
from openk3.config.recipe import (
    DataRecipe,
    OptimRecipe,
    ParallelRecipe,
    Recipe,
    RunRecipe,
    TrainRecipe,
)
from openk3.errors import ConfigError


def test_model_section_is_a_preset_and_changes(tmp_path):
    (tmp_path / "r.toml").write_text(
        '[model]\npreset = "nano"\nnum_experts = 16\n[model.linear_attn]\nhead_dim = 16\n'
    )
    recipe = load(Recipe, [tmp_path / "r.toml"], ["--optim.lr", "1e-3", "--train.steps=7"])
    assert recipe.model.num_experts == 16
    assert recipe.model.linear_attn.head_dim == 16
    assert recipe.model.linear_attn.num_heads == preset("nano").linear_attn.num_heads
    assert (recipe.optim.lr, recipe.train.steps) == (1e-3, 7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimRecipe(lr=0.0), "lr"),
        (lambda: OptimRecipe(warmup_fraction=1.5), "warmup_fraction"),
        (lambda: OptimRecipe(logit_cap=-1), "logit_cap"),
        (lambda: TrainRecipe(steps=0), "steps"),
        (lambda: ParallelRecipe(zero=4), r"zero \(4\) must be 0, 1, 2 or 3"),
        (lambda: ParallelRecipe(expert=4), r"expert \(4\) needs zero 1, 2 or 3"),
        (lambda: ParallelRecipe(zero=1, replicate=0), r"replicate \(0\)"),
        (lambda: RunRecipe(eval_every=-1), "eval_every"),
        (lambda: RunRecipe(sample_tokens=-1), "sample_tokens"),
        (lambda: RunRecipe(final_eval_tokens=-1), "final_eval_tokens"),
        (lambda: DataRecipe(sequence_tokens=0), "sequence_tokens"),
        (lambda: DataRecipe(weights=(float("nan"),)), "weights"),
        (lambda: TrainRecipe(seed=2**63), "seed"),
        (lambda: TrainRecipe(spike_nats=float("nan")), "spike_nats"),
        (lambda: OptimRecipe(embed_lr_scale=float("nan")), "embed_lr_scale"),
        (lambda: OptimRecipe(adam_betas=(1.0, 0.95)), "adam_betas"),
        (lambda: OptimRecipe(adam_eps=0.0), "adam_eps"),
        (lambda: preset("nano", initializer_range=float("nan")), "initializer_range"),
        (lambda: preset("nano", rms_norm_eps=-1.0), "rms_norm_eps"),
        (lambda: OptimRecipe(weight_decay=float("inf")), "weight_decay"),
    ],
)
def test_values_that_cannot_work(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_only_the_run_section_and_paths_are_free_to_differ_on_resume():
    base = Recipe()
    free = dataclasses.replace(
        base, run=RunRecipe(folder="x", eval_every=7), data=DataRecipe(train=("moved/data",))
    )
    assert free.deciding() == base.deciding()
    for section, name, value in [
        ("optim", "lr", 1e-3),
        ("train", "steps", 7),
        ("data", "seed", 1),
        ("model", "num_experts", 24),
    ]:
        changed = dataclasses.replace(getattr(base, section), **{name: value})
        other = dataclasses.replace(base, **{section: changed})
        differing = {k for k, v in other.deciding().items() if base.deciding()[k] != v}
        assert differing == {f"{section}.{name}"}
