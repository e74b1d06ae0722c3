"""Recipes are strict: every key known, every type checked, every message says where and what."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from openk3.config import ModelConfig, preset
from openk3.config.dump import describe, diff, to_dict, to_toml
from openk3.config.load import from_dict, load, take_flags
from openk3.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Source:
    path: str
    """Where."""
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Optim:
    lr: float = 1e-3
    """Peak learning rate."""
    kind: Literal["muon", "adamw"] = "muon"
    warmup_steps: int | None = None

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError(f"lr ({self.lr}) must be positive")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    steps: int
    """Optimizer steps of the run.

    A second paragraph."""
    model: ModelConfig = field(default_factory=lambda: preset("nano"))
    optim: Optim = field(default_factory=lambda: Optim(lr=2e-3))
    eval: Optim | None = None
    sources: tuple[Source, ...] = ()
    mix: dict[str, float] = field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.95)
    names: tuple[str, ...] = ()
    out: Path = Path("runs")
    resume: bool = False
    notes: dict[str, Any] | None = None
    mode: Literal["auto", 1] | None = "auto"


def recipe_file(folder: Path, text: str, name: str = "a.toml") -> Path:
    (folder / name).write_text(text, "utf-8")
    return folder / name


def test_later_files_win_then_flags_and_unnamed_keys_keep_the_parents_default(tmp_path):
    first = recipe_file(tmp_path, "steps = 5\n[optim]\nkind = 'adamw'\nwarmup_steps = 3")
    second = recipe_file(tmp_path, "[optim]\nwarmup_steps = 'none'\n[mix]\nweb = 1", "b.toml")
    got = load(Recipe, [first, second], ["--steps=7", "--mix.code", "0.5", "--resume"])
    assert got.steps == 7
    assert got.optim == Optim(lr=2e-3, kind="adamw")
    assert got.mix == {"web": 1.0, "code": 0.5}
    assert got.resume
    assert load(Recipe, [first]).optim.warmup_steps == 3


def test_every_kind_of_value_from_flags():
    argv = '--steps 1_000 --betas 0.8,0.9 --names ["a,b"] --out /x --resume false --eval.lr -0'
    argv = argv.replace("-0", "1e-4") + " --notes {a=1} --mode 1 --optim.warmup-steps 4"
    got = load(Recipe, [], argv.split())
    assert (got.steps, got.betas, got.names, got.out) == (1000, (0.8, 0.9), ("a,b",), Path("/x"))
    assert (got.resume, got.notes, got.mode) == (False, {"a": 1}, 1)
    assert got.eval == Optim(lr=1e-4)
    assert got.optim.warmup_steps == 4
    assert load(Recipe, [], ["--steps", "1", "--mode", "none", "--eval", "none"]).mode is None


def test_a_table_may_start_from_a_preset(tmp_path):
    path = recipe_file(
        tmp_path, "steps = 1\n[model]\npreset = 'micro'\n[model.linear_attn]\nhead_dim=32"
    )
    got = load(Recipe, [path], ["--model.num_experts", "128"])
    linear = dataclasses.replace(preset("micro").linear_attn, head_dim=32)
    assert got.model == preset("micro", num_experts=128, linear_attn=linear)


@pytest.mark.parametrize(
    ("text", "flags", "parts"),
    [
        ("stepz = 1", "", ["a.toml", "'stepz'", "'steps'"]),
        ("steps = 1\n[optim]\nlearning = 1", "", ["a.toml", "'optim.learning'", "lr, kind"]),
        ("steps = 1\nlr = 1", "", ["a.toml", "'optim.lr' or 'eval.lr'"]),
        ("steps = '1'", "", ["a.toml", "steps", "an int", "'1'"]),
        ("steps = true", "", ["an int", "True"]),
        ("steps = 1.0", "", ["an int", "1.0"]),
        ("steps = 1\n[optim]\nlr = 'high'", "", ["optim.lr", "float", "'high'"]),
        ("steps = 1\nresume = 1", "", ["resume", "bool"]),
        ("steps = 1\noptim = 3", "", ["optim", "table", "3"]),
        ("steps = 1\n[optim]\nkind = 'adam'", "", ["optim.kind", "'adamw'"]),
        ("steps = 1\nbetas = [0.9]", "", ["betas", "[float, float]"]),
        ("steps = 1\nnames = [1]", "", ["names.0", "str"]),
        ("steps = 1\n[[sources]]\nwait = 2", "", ["sources.0.wait", "path, weight"]),
        ("steps = 1\n[[sources]]\nweight = 2", "", ["sources.0.path", "required"]),
        ("steps = 1\n[optim]\nlr = -1", "", ["[optim]", "positive"]),
        ("steps = 1\n[model]\npreset = 'nan'", "", ["a.toml", "model.preset", "'nano'"]),
        ("steps = 1\n[model]\nnum_experts = 4", "", ["[model]", "num_experts_per_token"]),
        ("steps = ", "", ["a.toml", "TOML"]),
        ("", "", ["steps", "required", "--steps"]),
        ("", "--stepz 3", ["--stepz", "'--steps'"]),
        ("", "--steps many", ["--steps", "an int", "'many'"]),
        ("", "--steps", ["--steps needs a value"]),
        ("", "--lr 3 --steps 1", ["--lr", "'optim.lr'"]),
        ("", "--steps 1 --mix.web much", ["mix.web", "float"]),
        ("", "--steps 1 --notes {a", ["notes", "table"]),
        ("", "--steps 1 extra", ["'extra'"]),
        ("", "--steps 1 --mode 2", ["mode", "allowed are 'auto', 1"]),
    ],
)
def test_errors_name_the_place_the_value_and_what_to_do(tmp_path, text, flags, parts):
    with pytest.raises(ConfigError) as caught:
        load(Recipe, [recipe_file(tmp_path, text)], flags.split())
    for part in parts:
        assert part in str(caught.value)


def test_missing_and_unreadable_files(tmp_path):
    recipe_file(tmp_path, "", "nano.toml")
    with pytest.raises(ConfigError, match=r"mano.toml.*did you mean 'nano.toml'"):
        load(Recipe, [tmp_path / "mano.toml"])
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"b.toml is not valid TOML"):
        load(Recipe, [tmp_path / "b.toml"])
    with pytest.raises(ConfigError, match="cannot read recipe"):
        load(Recipe, [tmp_path])


def test_toml_and_json_read_back_to_the_same_configuration(tmp_path):
    config = Recipe(
        steps=3,
        model=preset("k3"),
        sources=(Source(path='quote " \\ \x7f \n é'), Source(path="b", weight=0.1)),
        mix={"a b": 1e-30, "c.d": float("inf")},
        notes={"x": [1, None, {"y": True}], "empty": {}},
        mode=None,
    )
    toml = recipe_file(tmp_path, to_toml(config))
    assert load(Recipe, [toml]) == config
    saved = recipe_file(tmp_path, json.dumps(to_dict(config)), "config.json")
    assert load(Recipe, [saved]) == config
    assert from_dict(Recipe, to_dict(config)) == config
    saved.write_text(json.dumps({"schema": 1, "id": "a", "config": to_dict(config)}))
    assert load(Recipe, [saved]) == config


def test_own_options_of_a_verb_are_left_alone():
    settings, rest = take_flags(
        Recipe,
        ["a.toml", "--out-dir", "x", "--steps", "3", "b.toml", "--quiet"],
        {"--out-dir", "--quiet"},
    )
    assert settings == [({"steps": "3"}, "--steps")]
    assert rest == ["a.toml", "--out-dir", "x", "b.toml", "--quiet"]


def test_help_shows_docs_types_and_the_defaults_in_force():
    text = describe(Recipe)
    assert "--steps INT\n      Optimizer steps of the run. A second paragraph." in text
    assert "--optim.lr FLOAT\n      Peak learning rate. (default 0.002)" in text
    assert "--model.preset STR" in text
    assert "(default 128)" in text  # nano's hidden size
    # a value to be typed keeps its letters
    assert "--optim.kind ONE OF 'muon', 'adamw'\n" in text


def test_diff_names_what_changed():
    old = Recipe(steps=3)
    new = dataclasses.replace(old, optim=Optim(lr=1.0), mode=1)
    assert diff(old, new) == ["optim.lr: 0.002 -> 1.0", "mode: 'auto' -> 1"]
    assert diff(old, old) == []


def test_base_is_what_flags_change():
    base = Recipe(steps=3, optim=Optim(lr=5.0))
    assert load(Recipe, [], ["--optim.kind", "adamw"], base=base).optim == Optim(
        lr=5.0, kind="adamw"
    )
