"""`k3 data`: exit codes, reports and messages."""

import json
from pathlib import Path

import pytest

from data.helpers import source_files, write_files
from openk3.cli import main


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_files(tmp_path / "src", source_files(10))


def test_build_then_info(sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "d")
    options = ["--out", out, "--vocab-size", "300", "--held-out", "0.3", "--json"]
    assert main(["data", "build", str(sources), *options]) == 0
    built = json.loads(capsys.readouterr().out)
    assert built["vocab_size"] == 300
    total = sum(split["num_bytes"] for split in built["splits"].values())
    assert total == sum(map(len, source_files(10).values()))

    assert main(["data", "info", out, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["splits"] == built["splits"]
    assert told["checksums"] == "ok"

    assert main(["data", "info", out]) == 0
    lines = capsys.readouterr().out
    assert "train" in lines
    assert "heldout" in lines
    assert "checksums ok" in lines

    again = str(tmp_path / "again")
    assert main(["data", "build", str(sources), "--out", again, "--tokenizer", out]) == 0


def test_local_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "d")
    options = ["--out", out, "--vocab-size", "400", "--local-corpus", "0.3", "--held-out", "0.2"]
    assert main(["data", "build", *options]) == 0
    assert "local corpus of 0.3 MB" in capsys.readouterr().out


def test_a_corrupt_shard_is_named(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "d"
    assert main(["data", "build", str(sources), "--out", str(out), "--vocab-size", "300"]) == 0
    shard = out / "train-00000.k3tok"
    raw = bytearray(shard.read_bytes())
    raw[100] ^= 4
    shard.write_bytes(raw)
    assert main(["data", "info", str(out)]) == 1
    assert f"k3 data: {shard} is corrupt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ([], 2, ""),
        (["bild"], 2, "unknown action 'bild' (did you mean 'build'?)"),
        (["build", "--out", "x", "--vocab-size", "300"], 1, "either paths or --local-corpus"),
        (["build", "/nowhere", "--out", "x", "--vocab-size", "300"], 1, "no such file or folder"),
        (["build", __file__, "--out", "x"], 1, "either a tokenizer or a vocab_size"),
        (["build", __file__, "--out", "x", "--vocab-size", "300"], 1, "one document"),
        (["info", "/nowhere"], 1, "/nowhere is not a token dataset"),
    ],
)
def test_wrong_use(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *argv]) == code
    assert message in capsys.readouterr().err


def test_unknown_options_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["data", "info", "x", "--jsn"])
    assert stop.value.code == 2
