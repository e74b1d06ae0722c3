"""Every command and example of docs/checkpoints.md runs as it stands."""

import re
import shlex
from pathlib import Path

from conftest import GOLDEN_SHARED
from model_folders import write_random
from openk3.cli import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
GOLDEN = GOLDEN_SHARED / "golden" / "tiny_checkpoint"


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if GOLDEN.exists():
        (tmp_path / "tiny_checkpoint").symlink_to(GOLDEN)
    else:
        write_random(tmp_path / "tiny_checkpoint")
    blocks = re.findall(r"```(sh|python)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert [kind for kind, _ in blocks].count("sh") == 2
    names: dict[str, object] = {}
    for kind, text in blocks:
        capsys.readouterr()
        if kind == "sh":
            for line in text.splitlines():
                command, *argv = shlex.split(line, comments=True)
                assert command == "k3"
                assert main(argv) == 0, line
        else:
            exec(compile(text, str(PAGE), "exec"), names)
            assert capsys.readouterr().out.splitlines() == re.findall(r"^# -> (.*)$", text, re.M)
