"""Recipes: deciding fields, model overrides and their errors."""

import dataclasses

import pytest

from openk3.config.recipe import (
    DataRecipe,
    ModelRecipe,
    OptimRecipe,
    Recipe,
    RunRecipe,
    TrainRecipe,
)
from openk3.errors import ConfigError


def test_overrides_reach_nested_tables():
    config = ModelRecipe(
        preset="nano", overrides={"num_experts": 16, "linear_attn": {"head_dim": 16}}
    ).build()
    assert config.num_experts == 16
    assert config.linear_attn.head_dim == 16
    assert config.linear_attn.num_heads == ModelRecipe().build().linear_attn.num_heads


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_expert": 16}, "model.overrides.num_expert is no field.*'num_experts'"),
        ({"linear_attn": {"head_dims": 1}}, "model.overrides.linear_attn.head_dims.*'head_dim'"),
        ({"num_experts": 4}, "num_experts_per_token"),
    ],
)
def test_bad_override_names_the_field(overrides, message):
    with pytest.raises(ConfigError, match=message):
        ModelRecipe(overrides=overrides).build()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimRecipe(lr=0.0), "optim.lr"),
        (lambda: OptimRecipe(warmup_fraction=1.5), "optim.warmup_fraction"),
        (lambda: OptimRecipe(logit_cap=-1), "optim.logit_cap"),
        (lambda: TrainRecipe(steps=0), "train.steps"),
        (lambda: TrainRecipe(compute_dtype="fp8"), "train.compute_dtype.*float32"),
        (lambda: RunRecipe(eval_every=-1), "run.eval_every"),
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
        ("model", "preset", "micro"),
    ]:
        changed = dataclasses.replace(getattr(base, section), **{name: value})
        other = dataclasses.replace(base, **{section: changed})
        differing = {k for k, v in other.deciding().items() if base.deciding()[k] != v}
        assert differing == {f"{section}.{name}"}
