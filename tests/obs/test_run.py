"""A run folder is made once, resumed any number of times, and never clobbered."""

import json

import pytest

from openk3.errors import ConfigError, StorageError
from openk3.obs import RunFolder, env, read_rows
from openk3.obs import run as run_module

CONFIG = {"train": {"steps": 3, "cap": float("inf")}, "names": ("a", "b")}


def test_create_keeps_config_environment_and_log_place(tmp_path):
    with RunFolder.create(tmp_path / "new" / "r", CONFIG, devices=["cpu"]) as run:
        assert run.attempt == 1
        assert run.log_path == run.path / "logs" / "attempt_1.log"
        assert run.log_path.parent.is_dir()
    saved = run_module.read_config(run.path)
    assert saved["schema"] == 1
    assert saved["config"] == {"train": {"steps": 3, "cap": None}, "names": ["a", "b"]}
    (attempt,) = run_module.read_env(run.path)
    assert attempt["devices"] == ["cpu"]
    assert attempt["packages"]["torch"] == env.version("torch")
    assert attempt["cpu_count"] >= 1


def test_resume_appends(tmp_path):
    with RunFolder.create(tmp_path / "r", CONFIG) as run:
        for step in (1, 2, 3):
            run.metrics.write({"kind": "step", "step": step})
        first = run.id
    with RunFolder.resume(tmp_path / "r", step=2, world_size=4) as run:
        assert (run.attempt, run.id) == (2, first)
        assert run.config["names"] == ["a", "b"]
        assert run.log_path.name == "attempt_2.log"
    kinds = [(row["kind"], row.get("step")) for row in read_rows(run.path / "metrics.jsonl")]
    assert kinds == [("header", None), ("step", 1), ("step", 2), ("resume", 2)]
    assert [a.get("world_size") for a in run_module.read_env(run.path)] == [None, 4]


def test_nothing_is_clobbered(tmp_path):
    RunFolder.create(tmp_path / "r", CONFIG).close()
    before = {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()}
    with pytest.raises(StorageError, match="already holds a run: pass --resume auto"):
        RunFolder.create(tmp_path / "r", {"other": 1})
    assert before == {p: p.read_bytes() for p in (tmp_path / "r").rglob("*") if p.is_file()}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    with pytest.raises(StorageError, match="not empty"):
        RunFolder.create(tmp_path / "mine", CONFIG)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    with pytest.raises(StorageError, match="cannot use"):
        RunFolder.create(tmp_path / "mine" / "thesis.txt", CONFIG)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run folder"):
        RunFolder.resume(tmp_path)
    for text, message in [("{", "cannot read"), ("{}", "needs schema"), ("[]", "needs schema")]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            RunFolder.resume(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"schema": 9, "id": "", "config": {}}))
    with pytest.raises(ConfigError, match="schema 9"):
        RunFolder.resume(tmp_path)
    for odd in ({"schema": "x"}, {"id": 1}, {"config": []}):
        saved = {"schema": 1, "id": "a", "config": {}} | odd
        (tmp_path / "config.json").write_text(json.dumps(saved))
        with pytest.raises(ConfigError, match="needs schema, id and config"):
            RunFolder.resume(tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_two_processes_cannot_write_one_run(tmp_path):
    with RunFolder.create(tmp_path, CONFIG), pytest.raises(StorageError, match="another process"):
        RunFolder.resume(tmp_path)


def test_code_state(tmp_path, monkeypatch):
    monkeypatch.setattr(env, "code_diff", lambda: "--- a\n+++ b")
    RunFolder.create(tmp_path, CONFIG).close()
    RunFolder.resume(tmp_path).close()
    assert (tmp_path / "code.diff").read_text() == "--- a\n+++ b\n"
    assert (tmp_path / "code_2.diff").exists()


def test_without_git_the_code_state_is_unknown(monkeypatch):
    monkeypatch.setattr(env.subprocess, "run", _no_git)
    assert env.commit() is None
    assert env.code_diff() is None


def _no_git(*_args, **_kwargs):
    raise FileNotFoundError("git")


def test_machine_facts():
    assert (env.peak_memory() or 0) > 1 << 20
    assert (env.total_memory() or 0) > (env.peak_memory() or 0)
    assert env.version("no-such-package") is None
