"""k3 pretrain, generate and chat on a tiny model, as a user runs them."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
import torch

from openk3 import cli
from openk3.cli.pretrain import _without_resume, run_folder
from openk3.config.dump import to_toml
from openk3.config.recipe import Recipe
from openk3.data.build import build
from openk3.engine.folder import open_folder
from openk3.obs.metrics import read_rows
from tiny_run import tiny_recipe, write_tiny_data

ENV = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    base = tmp_path_factory.mktemp("pretrain")
    recipe = tiny_recipe(write_tiny_data(base / "data"))
    (base / "tiny.toml").write_text(to_toml(recipe))
    return base / "tiny.toml"


def test_trains_from_a_recipe_and_flags(recipe_file, tmp_path, capsys):
    folder = tmp_path / "run"
    argv = ["pretrain", str(recipe_file), "--run.folder", str(folder), "--train.steps=3"]
    assert cli.main(argv) == 0
    said = capsys.readouterr()
    assert "trained 3 steps" in said.out
    assert "bits/byte" in said.out
    assert f"k3 generate {folder}" in said.out
    assert "step 3/3 100.0% | loss" in said.err
    assert (folder / "report.html").stat().st_size > 1000
    assert cli.main(argv) == 1
    assert "already holds a run" in capsys.readouterr().err
    assert cli.main([*argv, "--resume", "auto", "--json", "--threads", "1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["steps"], facts["skipped_steps"], facts["folder"]) == (3, 0, str(folder))


def test_a_report_that_cannot_be_written_hides_nothing(recipe_file, tmp_path, capsys):
    argv = ["pretrain", str(recipe_file), "--run.folder", str(tmp_path / "run"), "--resume=auto"]
    argv += ["--train.steps=2"]
    assert cli.main([*argv, "--run.stop_after=1"]) == 0
    (tmp_path / "run/report.html").unlink()
    (tmp_path / "run/report.html").mkdir()
    assert cli.main(argv) == 0
    said = capsys.readouterr()
    assert "trained 2 steps" in said.out
    assert "WARNING: there is no report: cannot write" in said.err


def test_dry_run_prints_a_recipe_that_reads_back(recipe_file, capsys, tmp_path):
    with pytest.raises(SystemExit) as left:
        cli.main(["pretrain", str(recipe_file), "--optim.lr", "0.5", "--dry-run"])
    assert left.value.code == 0
    (tmp_path / "again.toml").write_text(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        cli.main(["pretrain", str(tmp_path / "again.toml"), "--dry-run"])
    assert capsys.readouterr().out == (tmp_path / "again.toml").read_text()
    assert "lr = 0.5" in (tmp_path / "again.toml").read_text()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--train.step=3", "did you mean '--train.steps'?"),
        ("--train.steps=many", "train.steps must be an int"),
        ("--run.device=cuda:77", "needs GPU 77"),
        ("--data.train=nowhere", "not a token dataset"),
    ],
)
def test_wrong_settings_are_one_line(recipe_file, tmp_path, capsys, flag, message):
    argv = ["pretrain", str(recipe_file), f"--run.folder={tmp_path / 'r'}", flag]
    assert cli.main(argv) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_folder_comes_from_the_recipes_name():
    assert run_folder(Recipe(), ["recipes/a.toml", "recipes/nano.toml"]) == Path("runs/nano")
    assert run_folder(Recipe(), []) == Path("runs/pretrain")


def test_the_command_to_go_on_has_one_resume():
    words = ["r.toml", "--resume", "never", "--train.steps", "3", "--resume=auto"]
    assert _without_resume(words) == ["r.toml", "--train.steps", "3"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.e2e
def test_ctrl_c_saves_and_says_how_to_go_on(recipe_file, tmp_path, number):
    folder = tmp_path / "run"
    argv = [sys.executable, "-m", "openk3", "pretrain", str(recipe_file)]
    argv += ["--run.folder", str(folder), "--train.steps", "100000", "--run.checkpoint_every=0"]
    process = subprocess.Popen(argv, env=ENV, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("step 2/"):
            process.send_signal(number)
            break
    rest = process.stderr.read()
    assert process.wait(60) == 130
    assert "stopped after step" in rest
    assert "--train.steps 100000 --run.checkpoint_every=0 --resume auto" in rest
    rows = list(read_rows(folder / "metrics.jsonl"))
    last = max(r["step"] for r in rows if r["kind"] == "step")
    assert (folder / f"checkpoints/step_{last:08d}").is_dir()
    assert [r["what"] for r in rows if r["kind"] == "event"][-1] == "interrupt"
    assert (folder / "report.html").is_file()


@pytest.fixture(scope="module")
def speaking_run(tmp_path_factory):
    """A run whose data has a tokenizer."""
    base = tmp_path_factory.mktemp("speaking")
    words = ["tide", "moon", "salt", "gull"]
    texts = [(f"d{i}", " ".join(words[(i + j) % 4] for j in range(30)).encode()) for i in range(9)]
    build(Source(texts), base / "data", vocab_size=520, held_out=0.2)
    recipe = tiny_recipe(base / "data", train__steps=2, run__sample_prompts=("tide",))
    table = to_toml(recipe).replace("vocab_size = 300", "vocab_size = 520")
    (base / "r.toml").write_text(table)
    assert cli.main(["pretrain", str(base / "r.toml"), "--run.folder", str(base / "run")]) == 0
    return base / "run"


class Source:
    """In-memory documents."""

    def __init__(self, texts):
        self.texts, self.skipped = texts, Counter()

    def __iter__(self):
        from openk3.data.sources import Document

        return (Document(*pair) for pair in self.texts)


def test_samples_are_written(speaking_run):
    samples = [r for r in read_rows(speaking_run / "metrics.jsonl") if r["kind"] == "sample"]
    assert [(r["step"], r["prompt"]) for r in samples] == [(2, "tide")]
    assert samples[0]["text"]


def test_generate_prints_prompt_and_continuation(speaking_run, capsys):
    argv = ["generate", str(speaking_run), "tide moon", "--max-tokens", "6", "--seed", "3"]
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert text.startswith("tide moon")
    assert cli.main([*argv, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert text == f"tide moon{facts['text']}\n"
    assert 1 <= facts["tokens"] <= 6
    checkpoint = str(speaking_run / "checkpoints/step_00000002")
    assert cli.main(["generate", checkpoint, *argv[2:]]) == 0
    assert capsys.readouterr().out == text


def test_the_likeliest_text_is_that_of_the_model_itself(speaking_run, capsys):
    argv = ["generate", str(speaking_run), "salt", "--temperature", "0", "--max-tokens", "20"]
    assert cli.main([*argv, "--json"]) == 0
    opened = open_folder(speaking_run)
    ids = torch.tensor([opened.tokenizer.encode("salt")])
    out = opened.model.generate(ids, max_new_tokens=20, temperature=0)[0, ids.shape[1] :]
    said = opened.tokenizer.decode(out.tolist(), skip_special=True)
    assert json.loads(capsys.readouterr().out)["text"] == said


def test_generate_from_nothing_and_from_standard_input(speaking_run, capsys, monkeypatch):
    assert cli.main(["generate", str(speaking_run), "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", StringIO("salt gull"))
    assert cli.main(["generate", str(speaking_run), "-", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("salt gull")


def test_chat_goes_on_with_what_stands(speaking_run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", StringIO("tide\nmoon\n\ntide\n"))
    assert cli.main(["chat", str(speaking_run), "--max-tokens", "5", "--temperature", "0"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()[:3]
    assert first.startswith("tide")
    assert second.startswith("moon")
    assert third == first


def test_no_model_there(tmp_path, capsys):
    assert cli.main(["generate", str(tmp_path / "nowhere")]) == 1
    assert "is no folder; train a model" in capsys.readouterr().err
