"""The whole life of a model in seconds: runs/quickstart.sh with a tiny recipe, verb by verb."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openk3.config.dump import to_toml
from openk3.text import tokenizer
from tiny_run import tiny_recipe

ROOT = Path(__file__).parents[2]


@pytest.mark.e2e
def test_text_to_published_files(tmp_path):
    recipe = to_toml(tiny_recipe(tmp_path / "data", run__sample_tokens=8))
    recipe = recipe.replace("vocab_size = 300", "vocab_size = 640")
    (tmp_path / "tiny.toml").write_text(recipe)
    settings = {
        "K3": f"{sys.executable} -m openk3",
        "PYTHONPATH": str(ROOT / "src"),
        "OUT": str(tmp_path / "out"),
        "RECIPE": str(tmp_path / "tiny.toml"),
        "STEPS": "12",
        "CORPUS_MB": "0.3",
        "VOCAB": "640",
        "SAMPLE": "8",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", str(ROOT / "runs/quickstart.sh")],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = tmp_path / "out"
    assert (out / "run/report.html").stat().st_size > 10_000
    config = json.loads((out / "hf/config.json").read_text())
    assert config["model_type"] == "kimi_k3"
    special = tokenizer.load(out / "data").special_tokens
    assert config["eos_token_id"] == special["<|end_of_msg|>"]
    assert config["pad_token_id"] == special["[PAD]"]
    assert config["media_placeholder_token_id"] == special["<|media_pad|>"]
    rows = (out / "run/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(row) for row in rows if json.loads(row)["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"]
