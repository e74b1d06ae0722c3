"""The examples of docs/text.md run and print what the page says."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "text.md"


def test_examples_print_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    expected = re.findall(r"^# -> (.*)$", "\n".join(blocks), re.MULTILINE)
    namespace = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    assert len(blocks) >= 6
    assert capsys.readouterr().out.splitlines() == expected
