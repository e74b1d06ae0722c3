"""docs/recipes.md is executed: its recipe loads, its Python runs, its messages are real."""

import re
from pathlib import Path

import pytest

from openk3.config.load import load
from openk3.config.recipe import Recipe
from openk3.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text("utf-8")


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M)
    assert found, f"docs/recipes.md has no {language} block"
    return found[1]


def test_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text(block("toml"), "utf-8")
    exec(block("python"), {})
    printed = capsys.readouterr().out
    assert "num_experts = 64" in printed
    assert "--data.train LIST OF STR" in printed


@pytest.mark.parametrize(
    ("number", "text", "flags"),
    [
        (0, "optim.learning_rate = 1", []),
        (1, "lr = 1", []),
        (2, "", ["--train.step", "3"]),
        (3, "", ["--train.steps", "many"]),
        (4, "model.num_experts = 2", []),
    ],
)
def test_messages(tmp_path, monkeypatch, number, text, flags):
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text(text, "utf-8")
    with pytest.raises(ConfigError) as caught:
        load(Recipe, ["my.toml"], flags)
    shown = block("text").splitlines()[number].removesuffix("...")
    assert str(caught.value).startswith(shown)
