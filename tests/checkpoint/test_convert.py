"""k3 convert and k3 inspect PATH: what they write, say and refuse."""

import json
import subprocess
import sys

import pytest
import torch

import openk3
from model_folders import Spoiler, write_random
from openk3.checkpoint.convert import files_of_rank, lossless, verify
from openk3.checkpoint.hf.folder import open_folder
from openk3.checkpoint.hf.layout import from_file
from openk3.checkpoint.hf.save import Target
from openk3.checkpoint.trained import load_trained
from openk3.cli import main
from openk3.errors import InputError


def k3(*argv):
    return main([str(item) for item in argv])


def same(a, b):
    a, b = openk3.load(a).state_dict(), openk3.load(b).state_dict()
    return all(torch.equal(value, b[name]) for name, value in a.items())


CHAINS = [
    [["--experts", "dense"], ["--experts", "mxfp4"]],
    [["--layout", "stacked"], ["--layout", "published"]],
    [["--layout", "stacked", "--experts", "dense"], ["--experts", "mxfp4"]],
    [["--experts", "dense", "--dtype", "float32"], ["--experts", "mxfp4", "--dtype", "bfloat16"]],
    [["--expert-ranks", "4"], ["--max-shard-gb", "3e-5"]],
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: " ".join(chain[0]))
def test_there_and_back_again_changes_no_value(folder, tmp_path, chain):
    there, back = tmp_path / "there", tmp_path / "back"
    assert k3("convert", folder, there, "--verify", *chain[0]) == 0
    assert k3("convert", there, back, *chain[1]) == 0
    assert same(folder, back)
    first, last = open_folder(folder), open_folder(back)
    assert {n: (e.shape, e.dtype) for n, e in first.entries.items()} == {
        n: (e.shape, e.dtype) for n, e in last.entries.items()
    }


def test_to_training_and_back(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    assert k3("convert", folder, tmp_path / "run", "--layout", "training", "--verify") == 0
    trained = load_trained(tmp_path / "run")
    wide = openk3.load(folder, dtype=torch.float32).state_dict()
    assert trained.step == 0
    assert all(torch.equal(v, wide[n]) for n, v in trained.model.state_dict().items())
    back = tmp_path / "back"
    assert k3("convert", tmp_path / "run", back, "--experts", "mxfp4", "--dtype", "bfloat16",
              "--verify") == 0  # fmt: skip
    assert same(folder, back)
    assert (back / "tokenizer.json").exists()
    step = tmp_path / "run" / "checkpoints" / "step_00000000"
    assert k3("convert", step, tmp_path / "again") == 0
    again = openk3.load(tmp_path / "again").state_dict()
    assert all(torch.equal(again[n], v) for n, v in wide.items())


def test_a_torn_training_checkpoint_is_refused(folder, tmp_path, capsys):
    assert k3("convert", folder, tmp_path / "run", "--layout", "training") == 0
    step = tmp_path / "run" / "checkpoints" / "step_00000000"
    raw = bytearray((step / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (step / "model.safetensors").write_bytes(raw)
    assert k3("convert", step, tmp_path / "x") == 1
    assert "corrupt" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_stacked_names_are_the_models_own(folder, tmp_path):
    assert k3("convert", folder, tmp_path / "x", "--layout", "stacked", "--experts", "dense") == 0
    model = openk3.load(tmp_path / "x")
    assert set(open_folder(tmp_path / "x").entries) == set(model.state_dict())


def test_verify_reports_what_rounding_does(tmp_path, capsys):
    dense = write_random(tmp_path / "dense", mxfp4_experts=False)
    code = k3("convert", dense, tmp_path / "x", "--experts", "mxfp4", "--verify", "--json")
    verdict = json.loads(capsys.readouterr().out)["verify"]
    assert code == 0
    assert not verdict["lossless"]
    assert verdict["max_difference"] > 0
    assert 0 < verdict["kl"] < 1


def test_verify_fails_when_a_lossless_side_differs(folder, tmp_path, capsys, monkeypatch):
    other = write_random(tmp_path / "other", seed=1)
    assert verify(folder, other).max_difference > 0
    monkeypatch.setattr("openk3.checkpoint.convert.verify", lambda a, b: verify(a, other))
    assert k3("convert", folder, tmp_path / "x", "--verify") == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "how", "exact"),
    [
        ("folder", Target(mxfp4_experts=True), True),
        ("folder", Target(), True),
        ("folder", Target(dtype="F32"), True),
        ("dense_folder", Target(mxfp4_experts=True), False),
        ("dense_folder", Target(dtype="BF16"), True),
    ],
)
def test_which_conversions_are_lossless(kind, how, exact, request):
    assert lossless(open_folder(request.getfixturevalue(kind)), how) == exact


def test_each_rank_finds_its_experts_in_files_of_its_own(folder, tmp_path):
    assert k3("convert", folder, tmp_path / "x", "--expert-ranks", "3") == 0
    found = open_folder(tmp_path / "x")
    for rank in range(3):
        files = set(files_of_rank(tmp_path / "x", rank))
        experts = {
            from_file(name).expert for name, entry in found.entries.items() if entry.path in files
        }
        assert experts == {None, 2 * rank, 2 * rank + 1}
    with pytest.raises(InputError, match="3 ranks"):
        files_of_rank(tmp_path / "x", 3)


def test_tokenizer_files_and_inert_config_keys_travel(folder, tmp_path):
    (folder / "tiktoken.model").write_bytes(b"YQ== 0\n")
    (folder / "generation_config.json").write_text('{"max_length": 7}')
    Spoiler(folder).edit_config(lambda c: c["text_config"].update(transformers_version="4.56.2"))
    assert k3("convert", folder, tmp_path / "x", "--experts", "dense") == 0
    assert (tmp_path / "x" / "tiktoken.model").read_bytes() == b"YQ== 0\n"
    assert json.loads((tmp_path / "x" / "generation_config.json").read_text()) == {"max_length": 7}
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["text_config"]["transformers_version"] == "4.56.2"
    assert "quantization_config" not in config["text_config"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--expert-ranks", "7"], "allowed: 1 to 6"),
        (["--expert-ranks", "2", "--layout", "stacked"], "has no ranks"),
        (["--max-shard-gb", "0"], "max_shard_bytes"),
    ],
)
def test_impossible_targets(folder, tmp_path, capsys, argv, message):
    assert k3("convert", folder, tmp_path / "x", *argv) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_inspect_a_folder(folder, capsys):
    assert k3("inspect", folder) == 0
    out = capsys.readouterr().out
    assert ": complete" in out
    assert "4 layers, width 96, 6 experts stored as MXFP4, without vision" in out
    assert k3("inspect", folder, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["complete"]
    assert facts["tensors"] == 208
    assert facts["bytes"] == sum(e.num_bytes for e in open_folder(folder).entries.values())


def test_inspect_lists_every_tensor(folder, capsys):
    assert k3("inspect", folder, "--tensors") == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, entry in open_folder(folder).entries.items():
        shape = " x ".join(map(str, entry.shape))
        assert [name, entry.dtype, *shape.split(), entry.path.name] in listed


def test_inspect_lists_what_is_wrong(folder, capsys):
    spoil = Spoiler(folder)
    name = "language_model.model.layers.1.input_layernorm.weight"
    spoil.rename(name, name + "x")
    assert k3("inspect", folder) == 1
    out = capsys.readouterr().out
    assert "NOT complete" in out
    assert f"missing: {name}" in out
    assert "unknown:" in out


def test_inspect_reads_headers_only(folder):
    """Data that cannot be read does not matter; torch is not even loaded."""
    for shard in open_folder(folder).shards:
        size, start = (
            shard.stat().st_size,
            min(e.offset for e in open_folder(folder).entries.values() if e.path == shard),
        )
        with open(shard, "r+b") as handle:
            handle.truncate(start)
            handle.truncate(size)
    code = "import sys, openk3.cli as c; c.main(sys.argv[1:]); print('torch' in sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(folder)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert ": complete" in out
    assert out.endswith("False\n")
