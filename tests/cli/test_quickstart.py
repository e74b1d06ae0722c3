"""k3 quickstart, whole, with a tiny model and corpus; and again, to see that it goes on."""

import json
import re
import threading
from pathlib import Path

import pytest

from openk3 import cli
from openk3.config.dump import to_toml
from openk3.config.load import load
from openk3.config.recipe import Recipe
from openk3.ops.native import build
from openk3.report import png
from tiny_run import tiny_recipe


@pytest.fixture
def recipe(tmp_path):
    base = tiny_recipe(tmp_path / "data", run__sample_prompts=("def ",), run__sample_tokens=8)
    text = to_toml(base).replace("vocab_size = 300", "vocab_size = 640")
    text = re.sub(r'folder = ""', f'folder = "{tmp_path / "run"}"', text)
    (tmp_path / "tiny.toml").write_text(text)
    return tmp_path / "tiny.toml"


@pytest.mark.e2e
def test_from_nothing_to_a_speaking_model(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(png, "available", lambda: False)  # drawing has its own tests, and is slow
    compiler = threading.Thread(target=lambda: None)
    compiler.start()
    monkeypatch.setattr(build, "build_later", lambda: compiled.append(compiler) or compiler)
    compiled = []
    argv = ["quickstart", str(recipe), "--minutes", "0.02", "--corpus-mb", "0.3", "--threads", "1"]
    assert cli.main(argv) == 0
    said = capsys.readouterr()
    for name in ("Kimi K3", "3-byte context", "5-byte context", "xz -9e"):
        assert re.search(rf"{name}.*\d\.\d{{4}}", said.out), name
    assert f'k3 generate {tmp_path / "run"} "def "' in said.out
    assert (tmp_path / "run/report.html").is_file()
    assert len(compiled) == 1
    assert "training" in said.err
    assert "steps of 128 tokens" in said.err

    assert cli.main([*argv, "--json"]) == 0  # a finished run is shown again, not trained again
    facts = json.loads(capsys.readouterr().out)
    assert facts["steps"] >= 20
    assert facts["samples"][0]["prompt"] == "def "
    assert facts["seen_bytes"] > 0
    rows = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    kept = {r["name"]: r["bits_per_byte"] for r in rows if r["kind"] == "baseline"}
    assert kept == {n: b for n, b in facts["bits_per_byte"].items() if n != "Kimi K3"}
    assert "5-byte context" in (tmp_path / "run/report.html").read_text()
    assert facts["bits_per_byte"]["xz -9e"] > 1
    shown = re.search(r"Kimi K3\s+([\d.]+)", said.out).group(1)
    assert f"{facts['bits_per_byte']['Kimi K3']:.4f}" == shown


def test_a_recipe_must_say_where(recipe, tmp_path, capsys):
    recipe.write_text(recipe.read_text().replace(f'folder = "{tmp_path / "run"}"', ""))
    assert cli.main(["quickstart", str(recipe)]) == 1
    assert "must name one dataset" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nano", "micro", "quickstart"])
def test_published_recipes_are_valid(name):
    load(Recipe, [Path(__file__).parents[2] / f"recipes/{name}.toml"])
