"""openk3.save: the published names and sizes, exact round trips, and nothing half-written."""

import errno
import json
import os

import pytest
import torch
from safetensors import safe_open

import openk3
from model_folders import CONFIG
from openk3.checkpoint.experts import fake_quantise_experts, quantise_expert_inputs
from openk3.checkpoint.hf.folder import open_folder, survey
from openk3.errors import CheckpointError, InputError, StorageError
from openk3.model import K3
from openk3.ops import mx

IDS = torch.arange(30)[None]


def same(a, b):
    return all(torch.equal(v, b.state_dict()[n]) for n, v in a.state_dict().items())


@pytest.mark.parametrize("experts", ["dequant", "packed", "stream"])
@pytest.mark.parametrize("mxfp4", [True, False])
def test_round_trip_from_every_expert_form(folder, tmp_path, experts, mxfp4):
    model = openk3.load(folder, experts=experts)
    openk3.save(model, tmp_path / "copy", mxfp4_experts=mxfp4)
    assert survey(tmp_path / "copy").packed_experts == mxfp4
    assert same(openk3.load(folder), openk3.load(tmp_path / "copy"))


def test_float32_weights_stay_float32(tmp_path):
    model = K3(CONFIG, seed=1)
    openk3.save(model, tmp_path / "f32")
    assert same(model, openk3.load(tmp_path / "f32"))
    config = json.loads((tmp_path / "f32" / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "float32"
    assert "quantization_config" not in config["text_config"]


def test_names_sizes_and_the_files_beside(folder, tmp_path):
    for name in ("tiktoken.model", "tokenizer_config.json", "modeling_kimi_k3.py", "secret.txt"):
        (folder / name).write_text("{}")
    model = openk3.load(folder)
    openk3.save(model, tmp_path / "x", mxfp4_experts=True, max_shard_bytes=50e3)
    shards = sorted(p.name for p in (tmp_path / "x").glob("*.safetensors"))
    total = len(shards)
    assert total > 8
    assert shards == [f"model-{n:05d}-of-{total:06d}.safetensors" for n in range(1, total + 1)]
    found = open_folder(tmp_path / "x")
    for shard in found.shards:
        assert sum(e.num_bytes for e in found.entries.values() if e.path == shard) <= 50e3
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(e.num_bytes for e in found.entries.values())
    assert json.loads((tmp_path / "x" / "generation_config.json").read_text()) == {
        "max_length": 512,
        "eos_token_id": 1,
    }
    beside = {p.name for p in (tmp_path / "x").iterdir()} - set(shards)
    assert beside == {"config.json", "generation_config.json", "model.safetensors.index.json",
                      "tiktoken.model", "tokenizer_config.json", "modeling_kimi_k3.py"}  # fmt: skip


def test_the_reference_library_reads_what_we_write(folder, tmp_path):
    model = openk3.load(folder, experts="packed")  # keeps bytes, also those of -0
    openk3.save(model, tmp_path / "x", mxfp4_experts=True)
    original = open_folder(folder).entries
    (shard,) = (tmp_path / "x").glob("*.safetensors")
    with safe_open(shard, "pt") as ours:
        assert set(ours.keys()) == set(original)
        for name, entry in original.items():
            with safe_open(entry.path, "pt") as theirs:
                assert torch.equal(ours.get_tensor(name), theirs.get_tensor(name)), name


def test_every_tensor_is_aligned_to_its_items(folder, tmp_path):
    openk3.save(openk3.load(folder), tmp_path / "x", mxfp4_experts=True, max_shard_bytes=3e4)
    sizes = {"F32": 4, "BF16": 2, "U8": 1}
    for entry in open_folder(tmp_path / "x").entries.values():
        assert entry.offset % sizes[entry.dtype] == 0


def test_what_qat_multiplied_with_is_what_is_written(tmp_path):
    for experts, inputs in (("packed", True), ("packed", False), ("stream", True)):
        model = fake_quantise_experts(K3(CONFIG, seed=2), mxfp8_inputs=inputs).eval()
        target = tmp_path / f"{experts}-{inputs}"
        openk3.save(model, target, mxfp4_experts=True)
        served = openk3.load(target, dtype=torch.float32, experts=experts)
        quantise_expert_inputs(served, inputs)
        with torch.no_grad():
            assert torch.equal(model(IDS), served(IDS))
    with pytest.raises(InputError, match="layer 1 are not quantised"):
        quantise_expert_inputs(openk3.load(target))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1.8 * 2.0**127])
def test_weights_that_cannot_be_exported_are_named(tmp_path, bad):
    model = K3(CONFIG, seed=1)
    with torch.no_grad():
        model.layers[2].block_sparse_moe.experts.w3[4, 1, 2] = bad
    with pytest.raises(InputError, match=r"layers\.2\.block_sparse_moe\.experts\.w3\[4\]"):
        openk3.save(model, tmp_path / "x", mxfp4_experts=True)
    assert list(tmp_path.iterdir()) == []


def test_other_weights_must_be_finite_too(tmp_path):
    model = K3(CONFIG, seed=1)
    with torch.no_grad():
        model.layers[0].self_attn.k_proj.weight[3, 3] = torch.nan
    with pytest.raises(InputError, match=r"layers\.0\.self_attn\.k_proj\.weight"):
        openk3.save(model, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_packed_blocks_that_are_nan_or_infinite_are_refused(folder, tmp_path):
    model = openk3.load(folder, experts="packed")
    model.layers[3].block_sparse_moe.experts.w2_scale[5, 0, 0] = 255
    with pytest.raises(InputError, match=r"layers\.3\.block_sparse_moe\.experts\.w2\[5\]"):
        openk3.save(model, tmp_path / "x", mxfp4_experts=True)


def test_a_full_disk_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    model = openk3.load(folder)
    written, real = [], os.pwrite

    def full_after_a_while(handle, data, offset):
        written.append(len(data))
        if sum(written) > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", full_after_a_while)
    with pytest.raises(StorageError, match="No space left"):
        openk3.save(model, tmp_path / "target")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_folder_in_use_is_never_touched(folder, tmp_path):
    model = openk3.load(folder)
    before = sorted(p.name for p in folder.iterdir())
    with pytest.raises(InputError, match="choose another"):
        openk3.save(model, folder)
    assert sorted(p.name for p in folder.iterdir()) == before
    (tmp_path / "empty").mkdir()
    openk3.save(model, tmp_path / "empty")
    assert survey(tmp_path / "empty").complete


def test_a_model_that_is_not_its_config_is_refused(tmp_path):
    model = K3(CONFIG, seed=1)
    model.config = CONFIG.replace(vocab_size=121)
    with pytest.raises(InputError, match=r"embed_tokens\.weight is \[120, 96\]"):
        openk3.save(model, tmp_path / "x")


def test_mxfp4_needs_whole_blocks(tmp_path):
    config = CONFIG.replace(moe_intermediate_size=48)
    with pytest.raises(InputError, match=r"experts\.w2 has rows of 48 values"):
        openk3.save(K3(config, seed=1), tmp_path / "x", mxfp4_experts=True)


def test_a_job_that_gives_the_wrong_tensor_is_caught(tmp_path):
    from openk3.checkpoint.hf.layout import Tensor
    from openk3.checkpoint.hf.write import Produced, write_folder

    def write(value, name="a"):
        write_folder(tmp_path / "x", [[Tensor("a", (2, 3), "F32")]],
                     [lambda: [Produced(name, value)]], config={}, companions=None,
                     max_shard_bytes=1e9, extra=lambda _: {})  # fmt: skip

    with pytest.raises(CheckpointError, match="planned as F32"):
        write(torch.zeros(2, 3, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"planned as F32 \[2, 3\]"):
        write(torch.zeros(3, 2))
    assert not (tmp_path / "x").exists()


def test_quantising_is_what_ops_mx_does(tmp_path):
    model = K3(CONFIG, seed=3)
    openk3.save(model, tmp_path / "x", mxfp4_experts=True)
    back = openk3.load(tmp_path / "x", dtype=torch.float32)
    w1 = model.layers[1].block_sparse_moe.experts.w1
    assert torch.equal(back.layers[1].block_sparse_moe.experts.w1, mx.fake_quantize(w1))
