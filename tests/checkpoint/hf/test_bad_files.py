"""Every way a folder can be wrong is refused, naming the file and the tensor."""

import json
import struct

import pytest

from openk3.checkpoint.hf.folder import open_folder, survey
from openk3.checkpoint.hf.header import read_header
from openk3.errors import CheckpointError, ConfigError

LAYER = "language_model.model.layers.1."
NORM = LAYER + "input_layernorm.weight"
SCALE = LAYER + "block_sparse_moe.experts.2.w1.weight_scale"
INDEX = "model.safetensors.index.json"


def refused(path, *words, kind=CheckpointError, strict=True):
    with pytest.raises(kind) as caught:
        open_folder(path, strict=strict)
    for word in words:
        assert str(word) in str(caught.value)


def test_a_good_folder_is_complete(folder, dense_folder):
    found = survey(folder)
    assert found.complete
    assert found.packed_experts
    assert len(found.shards) > 3
    assert not survey(dense_folder).packed_experts


def test_missing_shard(folder, spoil):
    shard = spoil.shard_of(NORM)
    shard.unlink()
    refused(folder, shard.name, "missing")
    found = survey(folder)
    assert to_short(NORM) in " ".join(found.missing)
    refused(folder, shard.name, strict=False)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    refused(folder, "shard model-", "is missing (")


def to_short(name):
    return name.removeprefix("language_model.")


@pytest.mark.parametrize("keep", [0, 5, 8, 60, -1])
def test_truncated_shard(folder, spoil, keep):
    shard = spoil.shard_of(NORM)
    raw = shard.read_bytes()
    shard.write_bytes(raw[:keep])
    refused(folder, shard.name, "cut short")


def test_trailing_bytes(folder, spoil):
    shard = spoil.shard_of(NORM)
    shard.write_bytes(shard.read_bytes() + b"x")
    refused(folder, shard.name, "longer")


def test_index_that_points_nowhere(folder, spoil):
    spoil.edit_index(lambda i: i["weight_map"].update({"language_model.ghost": spoil.shard_of(
        NORM).name}))  # fmt: skip
    refused(folder, "language_model.ghost", "does not hold it")


@pytest.mark.parametrize("shard", ["../other.safetensors", "/etc/passwd", "", "..", 7])
def test_index_that_leaves_the_folder(folder, spoil, shard):
    spoil.edit_index(lambda i: i["weight_map"].update({NORM: shard}))
    refused(folder, NORM, "not a file name")


def test_index_that_names_the_wrong_shard(folder, spoil):
    other = next(s for s in set(spoil.index()["weight_map"].values())
                 if s != spoil.shard_of(NORM).name)  # fmt: skip
    spoil.edit_index(lambda i: i["weight_map"].update({NORM: other}))
    refused(folder, NORM, other)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": 3}', "weight_map"),
        ('{"weight_map": ' + "[" * 100_000, "nested too deeply"),
        ('{"weight_map": ' + '{"a":' * 100_000, "nested too deeply"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' twice"),
    ],
    ids=lambda value: value[:20],
)
def test_unreadable_index(folder, text, word):
    (folder / INDEX).write_text(text)
    refused(folder, INDEX, word)


def test_the_size_that_an_index_claims_is_not_believed(folder, spoil):
    spoil.edit_index(lambda i: i.update(metadata={"total_size": 10**400}))
    assert survey(folder).complete


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": 1, "a": 2}', "[]", "\xff"])
def test_unreadable_config(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refused(folder, "config.json", "JSON" if text[0] != "{" else "'a' twice")


def test_wrong_shape(folder, spoil):
    def transpose(header):
        header[LAYER + "self_attn.q_proj.weight"]["shape"].reverse()

    spoil.edit_header(LAYER + "self_attn.q_proj.weight", transpose)
    refused(folder, LAYER + "self_attn.q_proj.weight", "[96, 48]", "[48, 96]")


def test_wrong_dtype(folder, spoil):
    name = LAYER + "self_attn.dt_bias"
    spoil.edit_header(name, lambda h: h[name].update(dtype="I32"))
    refused(folder, name, "I32", "F32")


def test_scale_bytes_of_the_wrong_length(folder, spoil):
    spoil.edit_header(SCALE, lambda h: h[SCALE].update(shape=[32, 2]))
    refused(folder, SCALE, "[32, 2]", "[64, 1]")


def test_unknown_tensor_is_named_with_its_neighbour(folder, spoil):
    spoil.rename(NORM, LAYER + "input_layer_norm.weight")
    refused(folder, "unknown", "input_layer_norm.weight", "did you mean", "missing: " + NORM)
    found = open_folder(folder, strict=False)
    assert NORM in found.missing[0]


def test_unknown_expert(folder, spoil):
    spoil.rename(SCALE, SCALE.replace("experts.2", "experts.6"))
    refused(folder, "experts.6", "missing: " + SCALE)


def test_the_same_tensor_under_two_names(folder, spoil):
    other = LAYER + "post_attention_layernorm.weight"
    spoil.rename(other, NORM.removeprefix("language_model."))
    refused(folder, NORM, "same tensor", strict=False)


def test_the_same_tensor_in_two_shards(folder, spoil):
    shard = spoil.shard_of(NORM)
    copy = folder / "extra.safetensors"
    copy.write_bytes(shard.read_bytes())
    other = next(n for n, s in spoil.index()["weight_map"].items() if s == shard.name and n != NORM)
    spoil.edit_index(lambda i: i["weight_map"].update({other: copy.name}))
    refused(folder, copy.name, strict=False)
    assert any("and again in" in line for line in survey(folder).wrong)


def test_config_that_contradicts_the_tensors(folder, spoil):
    spoil.edit_config(lambda c: c["text_config"].update(num_experts=7))
    refused(folder, "gate.weight has shape [6, 96]", "[7, 96]")
    assert any("experts.6.w1" in name for name in survey(folder).missing)


def test_a_billion_experts_are_not_listed(folder, spoil):
    spoil.edit_config(lambda c: c["text_config"].update(num_experts=10**9))
    refused(folder, "[6, 96]", "[1000000000, 96]", "more")
    found = survey(folder)
    assert len(found.missing) < 200_000
    assert any("more weight_packed of layers.1." in line for line in found.missing)


def test_more_layers_than_tensors(folder, spoil):
    spoil.edit_config(lambda c: c["text_config"].update(num_hidden_layers=10**9))
    refused(folder, "num_hidden_layers", kind=ConfigError)
    spoil.edit_config(lambda c: c["text_config"]["linear_attn_config"].pop("kda_layers"))
    refused(folder, "1,000,000,000 layers", "the files hold only")


def test_control_characters_in_names(folder, spoil):
    shard = spoil.shard_of(NORM)
    spoil.edit_header(NORM, lambda h: h.update({"a\nb\x1b[31m": h.pop(NORM)}))
    refused(folder, shard.name, "'a\\nb\\x1b[31m'", "control characters")
    spoil.edit_index(lambda i: i["weight_map"].update({"a\nb": shard.name}))
    refused(folder, INDEX, "'a\\nb'")


def test_config_with_another_number_of_heads(folder, spoil):
    spoil.edit_config(lambda c: c["text_config"]["linear_attn_config"].update(num_heads=2))
    refused(folder, "q_proj.weight has shape [48, 96]")


def test_config_that_forgets_the_quantisation(folder, spoil):
    spoil.edit_config(lambda c: c["text_config"].pop("quantization_config"))
    refused(folder, "no quantization_config", "packed as MXFP4", strict=False)


def test_unknown_config_key(folder, spoil):
    spoil.edit_config(lambda c: c["text_config"].update(num_expert=6))
    refused(folder, "config.json", "num_expert", kind=ConfigError)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(model_type="kimi_linear", text_config=None), ["Kimi Linear"]),
        (lambda c: c.update(model_type="kimi_k2"), ["Kimi K2"]),
        (lambda c: c.update(model_type="deepseek_v3"), ["DeepSeek"]),
        (lambda c: c["text_config"].update(quantization_config={"quant_method": "fp8"}), ["'fp8'"]),
        (lambda c: c["text_config"].update(quantization_config={"quant_method": "gptq"}),
         ["'gptq'"]),
        (lambda c: c["text_config"]["quantization_config"].update(format="pack-quantized"),
         ["pack-quantized"]),
        (lambda c: c["text_config"]["quantization_config"]["config_groups"]["group_0"][
            "weights"].update(num_bits=8), ["num_bits is 8"]),
    ],
)  # fmt: skip
def test_foreign_configs_are_named(folder, spoil, change, words):
    spoil.edit_config(change)
    refused(folder, *words)


@pytest.mark.parametrize(
    ("ending", "word"),
    [(".weight_scale_inv", "fp8"), (".qweight", "GPTQ"), (".qzeros", "GPTQ"),
     (".lora_A.weight", "LoRA")],
)  # fmt: skip
def test_foreign_tensors_are_named(folder, spoil, ending, word):
    spoil.rename(NORM, LAYER + "self_attn.q_proj" + ending)
    refused(folder, word, ending)


def test_fp8_tensors_are_named(folder, spoil):
    name = SCALE
    spoil.edit_header(name, lambda h: h[name].update(dtype="F8_E4M3"))
    refused(folder, "fp8", name)


def test_a_folder_of_pickles_is_never_loaded(folder):
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refused(folder, "pytorch_model.bin", "pickle")


def test_no_folder_no_config(tmp_path):
    refused(tmp_path / "nowhere", "is no folder")
    refused(tmp_path, "config.json")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "not JSON")


def header_file(tmp_path, header, data=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return tmp_path / "x.safetensors"


def tensor(start=0, end=8, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "word"),
    [
        (b"{ ", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "not a JSON object"),
        (b'{"a": {"dtype":"U8","shape":[8],"data_offsets":[0,8]}, "a": {}}', "'a' twice"),
        ({"a": tensor(dtype="F4")}, "'F4'"),
        ({"a": tensor(shape=(3,))}, "needs 12 bytes"),
        ({"a": tensor(shape=(-2,))}, "malformed"),
        ({"a": tensor(shape=(2.0,))}, "malformed"),
        ({"a": tensor(shape=(True, 2))}, "malformed"),
        ({"a": tensor(shape=(10**4000, 10**4000))}, "malformed"),
        ({"a": tensor(shape=(1,) * 100_000)}, "malformed"),
        ({"a": tensor(end=1 << 64)}, "malformed"),
        ({"a": tensor(dtype=["F32"])}, "not known"),
        ({"a": tensor(end=-8)}, "malformed"),
        ({"a": {**tensor(), "more": 1}}, "expected exactly"),
        ({"a": 3}, "expected exactly"),
        ({"a": tensor(end=4, shape=(1,)), "b": tensor(0, 4, (1,))}, "overlap"),
        ({"a": tensor(4, 8, (1,))}, "holes"),
        ({"a": tensor(0, 4, (1,))}, "longer"),
        ({"a": tensor(0, 1 << 60, (1 << 58,))}, "cut short"),
    ],
)
def test_headers_that_lie(tmp_path, header, word):
    path = header_file(tmp_path, header)
    with pytest.raises(CheckpointError, match=r"x\.safetensors") as caught:
        read_header(path)
    assert word in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


def test_a_header_longer_than_its_file_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(CheckpointError, match="cut short"):
        read_header(path)


def test_headers_of_the_reference_writer_are_read(tmp_path):
    import torch
    from safetensors.torch import save_file

    tensors = {"b": torch.ones(3, 5), "a": torch.zeros(0, 2), "c": torch.ones(7).bfloat16()}
    save_file(tensors, tmp_path / "y.safetensors", metadata={"format": "pt"})
    entries = read_header(tmp_path / "y.safetensors")
    assert {n: e.shape for n, e in entries.items()} == {"a": (0, 2), "b": (3, 5), "c": (7,)}
