"""The code in docs/training.md runs as it stands, and the files it names exist."""

import re
from pathlib import Path

from data.helpers import make_dataset

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text("utf-8")


def test_the_page_runs(tmp_path, monkeypatch):
    make_dataset(tmp_path / "data" / "python", [300, 200])
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(code, names)
    assert names["finished"] is True
    assert names["model"].config == names["recipe"].model


def test_named_files_exist():
    names = set(re.findall(r"`((?:train|optim|checkpoint|parallel)/\w+\.py)`", PAGE))
    assert len(names) >= 8
    for name in names:
        assert (ROOT / "src/openk3" / name).is_file(), name
    for name in re.findall(r"`(tests/[\w/]+\.py)`", PAGE) + re.findall(r"docs/\w+\.md", PAGE):
        assert (ROOT / name).is_file(), name
