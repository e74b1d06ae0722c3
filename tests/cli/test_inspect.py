"""`k3 inspect` and the helpers verbs share."""

import argparse
import json
from dataclasses import dataclass

import pytest

from openk3.cli import common, main
from openk3.errors import ConfigError


def test_k3_as_a_table(capsys):
    assert main(["inspect", "k3"]) == 0
    out = capsys.readouterr().out
    assert "2,779,931,837,184  104,189,614,848" in out
    assert "A_log as stored" in out
    assert "27,648 B" in out
    assert "1,048,576" in out


def test_json_and_changed_fields(capsys):
    assert main(["inspect", "nano", "--json", "--num_experts", "64", "--context", "1K,512"]) == 0
    wide = json.loads(capsys.readouterr().out)
    assert main(["inspect", "nano", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert wide["total"] > plain["total"]
    assert [c["context"] for c in wide["contexts"]] == [1024, 512]
    assert sum(part["params"] for part in wide["parts"]) == wide["total"]


def test_a_recipe_file(tmp_path, capsys):
    recipe = tmp_path / "r.toml"
    recipe.write_text("[model]\npreset = 'nano'\nnum_experts = 16\n")
    assert main(["inspect", str(recipe), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"] > 0


def test_a_run_folder_is_its_model(tmp_path, capsys):
    config = {"schema": 1, "id": "a", "config": {"model": {"preset": "nano", "num_experts": 16}}}
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    of_the_run = json.loads(capsys.readouterr().out)["total"]
    assert main(["inspect", "nano", "--num_experts", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"] == of_the_run


def test_a_folder_without_a_model_is_said(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    assert "is no model folder: it has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["nanu"], 1, "did you mean 'nano'?"),
        (["nano", "--num_expert", "3"], 1, "did you mean '--num_experts'?"),
        (["nano", "--num_experts", "2"], 1, "num_experts_per_token"),
        (["none.toml"], 1, "there is no recipe file"),
    ],
)
def test_bad_input(argv, code, message, capsys):
    assert main(["inspect", *argv]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("argv", [[], ["nano", "extra"], ["nano", "--context", "0"]])
def test_wrong_usage_exits_with_two(argv, capsys):
    with pytest.raises(SystemExit) as left:
        main(["inspect", *argv])
    assert left.value.code == 2


def test_help_lists_fields(capsys):
    with pytest.raises(SystemExit) as left:
        main(["inspect", "--help"])
    assert left.value.code == 0
    assert "--linear_attn.num_heads INT" in capsys.readouterr().out


@dataclass(frozen=True)
class Small:
    steps: int = 3
    """How many."""
    name: str = "a"


def small(*argv: str):
    parser = common.parser("try", "A verb.")
    parser.add_argument("--out", default="x")
    common.add_json(parser)
    return common.parse_recipe(parser, Small, argv)


def test_parse_recipe(tmp_path):
    recipe = tmp_path / "a.toml"
    recipe.write_text("name = 'b'")
    config, options = small(str(recipe), "--steps", "5", "--out", "y")
    assert config == Small(5, "b")
    assert options.out == "y"
    with pytest.raises(ConfigError, match="--stepz"):
        small("--stepz", "5")


def test_dry_run_prints_and_leaves(capsys):
    for argv, text in [((), 'steps = 5\nname = "a"\n'), (("--json",), '{\n  "steps": 5,')]:
        with pytest.raises(SystemExit) as left:
            small("--steps", "5", "--dry-run", *argv)
        assert left.value.code == 0
        assert capsys.readouterr().out.startswith(text)


def test_recipe_help(capsys):
    with pytest.raises(SystemExit):
        small("--help")
    assert "--steps INT\n      How many. (default 3)" in capsys.readouterr().out


def test_table_and_numbers():
    text = common.table([("a", "10"), ("bcd", "2")], ("x", "n"))
    assert text == "x     n\n---  --\na    10\nbcd   2"
    assert [common.short(n) for n in (12, 1234, 2.78e12)] == ["12", "1.23K", "2.78T"]
    assert [common.binary(n) for n in (12, 2048, 3 << 40)] == ["12 B", "2.0 KiB", "3.0 TiB"]
    assert [common.positive(t) for t in ("7", "4k", "1M")] == [7, 4096, 1 << 20]
    for bad in ("0", "x", "-1"):
        with pytest.raises(argparse.ArgumentTypeError):
            common.positive(bad)


def test_threads():
    import torch

    before = torch.get_num_threads()
    parser = common.parser("try", "")
    common.add_threads(parser)
    common.use_threads(parser.parse_args([]).threads)
    assert torch.get_num_threads() == before
    common.use_threads(parser.parse_args(["--threads", "1"]).threads)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
    for bad in ("-1", "many"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--threads", bad])
