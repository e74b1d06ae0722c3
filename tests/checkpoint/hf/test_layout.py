"""The full-size proof without the weights: names, shapes, dtypes, counts, and the two-way map."""

from collections import Counter
from itertools import groupby

import pytest

from openk3.checkpoint.hf import layout
from openk3.config import preset


@pytest.fixture(scope="module")
def k3():
    return list(layout.published(preset("k3")))


def test_the_published_checkpoint_to_the_byte(k3):
    assert Counter(t.dtype for t in k3) == {"U8": 494_592, "BF16": 2_122, "F32": 506}
    assert len({t.name for t in k3}) == 497_220
    assert sum(t.num_bytes for t in k3) == 1_560_860_324_864


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("language_model.model.embed_tokens.weight", (163840, 7168), "BF16"),
        ("language_model.lm_head.weight", (163840, 7168), "BF16"),
        ("language_model.model.output_attn_res_proj.weight", (1, 7168), "BF16"),
        ("language_model.model.layers.0.mlp.down_proj.weight", (7168, 33792), "BF16"),
        ("language_model.model.layers.0.self_attn.A_log", (128,), "F32"),
        ("language_model.model.layers.90.self_attn.k_conv1d.weight", (12288, 1, 4), "F32"),
        ("language_model.model.layers.92.self_attn.q_b_proj.weight", (18432, 1536), "BF16"),
        ("language_model.model.layers.3.self_attn.kv_b_proj.weight", (24576, 512), "BF16"),
        ("language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias", (896,),
         "F32"),
        ("language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_packed",
         (3584, 1536), "U8"),
        ("language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale", (3072, 112),
         "U8"),
        ("language_model.model.layers.5.block_sparse_moe.shared_experts.up_proj.weight",
         (6144, 7168), "BF16"),
        ("vision_tower.patch_embed.pos_emb.weight", (64, 64, 1024), "BF16"),
        ("vision_tower.encoder.blocks.26.wqkv.weight", (4608, 1024), "BF16"),
        ("mm_projector.proj.2.weight", (7168, 4096), "BF16"),
    ],
)  # fmt: skip
def test_tensors_of_the_specification(k3, name, shape, dtype):
    assert next(t for t in k3 if t.name == name) == (name, shape, dtype)


def test_every_name_maps_to_the_model_and_back(k3):
    parameters = {p.name: p for p in layout.parameters(preset("k3"))}
    covered = Counter()
    for tensor in k3:
        slot = layout.from_file(tensor.name)
        assert layout.to_file(*slot) == tensor.name
        covered[slot.parameter] += 1
    for name, parameter in parameters.items():
        assert covered[name] == (2 * 896 if parameter.is_expert else 1)
    assert covered.keys() == parameters.keys()


def test_parts_of_a_stack_follow_each_other(k3):
    def stack(tensor):
        slot = layout.from_file(tensor.name)
        return slot.parameter, slot.part

    runs = [key for key, _ in groupby(k3, key=stack)]
    assert len(runs) == len(set(runs))


def test_text_only_and_stacked_names_are_understood():
    for name in ("model.layers.3.self_attn.q_proj.weight", "layers.3.self_attn.q_proj.weight"):
        assert layout.from_file(name).parameter == "layers.3.self_attn.q_proj.weight"
    stack = "layers.1.block_sparse_moe.experts.w1"
    assert layout.from_file(layout.stacked_name(stack)) == (stack, None, "weight")
    packed = layout.stacked_name(stack, "weight_packed")
    assert layout.from_file(packed) == (stack, None, "weight_packed")
    assert layout.from_file("lm_head.weight") == ("lm_head.weight", None, "weight")


def test_shared_experts_are_not_routed_experts():
    assert not layout.is_expert("layers.1.block_sparse_moe.shared_experts.up_proj.weight")
    assert layout.is_expert("layers.1.block_sparse_moe.experts.w2")


@pytest.mark.parametrize(("heads", "stored"), [(96, 128), (128, 128), (1, 1), (3, 4)])
def test_a_log_is_stored_as_a_power_of_two(heads, stored):
    assert layout.padded_heads(heads) == stored
