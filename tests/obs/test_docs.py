"""The code in docs/runs.md runs as it stands, and the page names every kind of row."""

import re
from pathlib import Path

from openk3.obs.rows import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "runs.md").read_text("utf-8")


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
    exec(code, {})
    kept = {path.name for path in Path("runs/nano").iterdir()}
    assert {"config.json", "env.json", "metrics.jsonl", "logs", "report.html"} <= kept
    assert {path.name for path in Path("runs/nano/logs").iterdir()} >= {"attempt_1.log"}


def test_the_page_names_every_kind_of_row():
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M)) == {*KINDS, "resume"}
