"""The code in docs/data.md runs as it stands."""

import re
from pathlib import Path

import pytest

from data.helpers import make_dataset

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dataset(tmp_path / "data" / "python", [3000, 2000])
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert names["saved"] == 4
    assert names["num_scored"] == 5002
    assert names["batch"].input_ids.shape == (4, 512)  # pyright: ignore[reportAttributeAccessIssue]
    assert names["one_row"].input_ids.shape == (1, 2048)  # pyright: ignore[reportAttributeAccessIssue]
