"""Every parameter of a K3 is in exactly one optimizer group, with the right head blocks."""

import re

import pytest
import torch

from openk3.config import preset
from openk3.errors import InputError
from openk3.model.k3 import K3
from openk3.model.vision import Projector, VisionTower
from openk3.optim.groups import RULES, assign, assign_all
from shapes_of_k3 import published_shapes

NANO = preset("nano")


def meta(shapes):
    return [(n, torch.empty(s, device="meta", requires_grad=True)) for n, s in shapes.items()]


# One KDA, one MLA, one dense and one MoE layer; numbers are the heights of Muon's blocks.
EXPECTED = {
    "embed_tokens.weight": ("embed", ()),
    "lm_head.weight": ("embed", ()),
    "norm.weight": ("plain", ()),
    "output_attn_res_norm.weight": ("plain", ()),
    "output_attn_res_proj.weight": ("plain", ()),
    "layers.0.input_layernorm.weight": ("plain", ()),
    "layers.0.post_attention_layernorm.weight": ("plain", ()),
    "layers.0.self_attention_res_norm.weight": ("plain", ()),
    "layers.0.self_attention_res_proj.weight": ("plain", ()),
    "layers.0.mlp_res_norm.weight": ("plain", ()),
    "layers.0.mlp_res_proj.weight": ("plain", ()),
    "layers.0.self_attn.q_proj.weight": ("muon", (32,)),
    "layers.0.self_attn.k_proj.weight": ("muon", (32,)),
    "layers.0.self_attn.v_proj.weight": ("muon", (32,)),
    "layers.0.self_attn.g_proj.weight": ("muon", (32,)),
    "layers.0.self_attn.f_b_proj.weight": ("muon", (32,)),
    "layers.0.self_attn.f_a_proj.weight": ("muon", (32,)),
    "layers.0.self_attn.o_proj.weight": ("muon", (128,)),
    "layers.0.self_attn.b_proj.weight": ("matrix", ()),
    "layers.0.self_attn.q_conv1d.weight": ("plain", ()),
    "layers.0.self_attn.k_conv1d.weight": ("plain", ()),
    "layers.0.self_attn.v_conv1d.weight": ("plain", ()),
    "layers.0.self_attn.A_log": ("plain", ()),
    "layers.0.self_attn.dt_bias": ("plain", ()),
    "layers.0.self_attn.o_norm.weight": ("plain", ()),
    "layers.0.mlp.gate_proj.weight": ("muon", (704,)),
    "layers.0.mlp.up_proj.weight": ("muon", (704,)),
    "layers.0.mlp.down_proj.weight": ("muon", (128,)),
    "layers.3.self_attn.q_a_proj.weight": ("muon", (32,)),
    "layers.3.self_attn.q_a_layernorm.weight": ("plain", ()),
    "layers.3.self_attn.q_b_proj.weight": ("muon", (48,)),
    "layers.3.self_attn.kv_a_proj_with_mqa.weight": ("muon", (80,)),
    "layers.3.self_attn.kv_a_layernorm.weight": ("plain", ()),
    "layers.3.self_attn.kv_b_proj.weight": ("muon", (32, 32)),
    "layers.3.self_attn.g_proj.weight": ("muon", (32,)),
    "layers.3.self_attn.o_proj.weight": ("muon", (128,)),
    "layers.3.block_sparse_moe.gate.weight": ("muon", (NANO.num_experts,)),
    "layers.3.block_sparse_moe.routed_expert_down_proj.weight": ("muon", (64,)),
    "layers.3.block_sparse_moe.routed_expert_up_proj.weight": ("muon", (128,)),
    "layers.3.block_sparse_moe.routed_expert_norm.weight": ("plain", ()),
    "layers.3.block_sparse_moe.experts.w1": ("muon", (64,)),
    "layers.3.block_sparse_moe.experts.w2": ("muon", (64,)),
    "layers.3.block_sparse_moe.experts.w3": ("muon", (64,)),
    "layers.3.block_sparse_moe.shared_experts.gate_proj.weight": ("muon", (128,)),
    "layers.3.block_sparse_moe.shared_experts.up_proj.weight": ("muon", (128,)),
    "layers.3.block_sparse_moe.shared_experts.down_proj.weight": ("muon", (128,)),
}


def test_nano_groups_are_the_listed_ones():
    found = {a.name: (a.kind, a.rows) for a in assign_all(meta(published_shapes(NANO)), NANO)}
    layers = {n: v for n, v in found.items() if re.match(r"(?!layers)|layers\.0\.", n)}
    # layer 3 repeats layer 0's norms; its mixer and FFN are what is new
    layers |= {n: v for n, v in found.items() if re.match(r"layers\.3\.(self_attn|block)", n)}
    assert layers == EXPECTED


@pytest.mark.parametrize("rung", ["nano", "micro", "k3"])
def test_every_parameter_once(rung):
    config = preset(rung, vision=None) if rung == "k3" else preset(rung)
    shapes = published_shapes(config)
    assignments = assign_all(meta(shapes), config)
    assert [a.name for a in assignments] == list(shapes)
    for a in assignments:
        if a.kind == "muon":
            assert shapes[a.name][-2] % sum(a.rows) == 0


@pytest.mark.parametrize("rung", ["nano", "micro"])
def test_the_listed_names_and_shapes_are_the_models(rung):
    with torch.device("meta"):
        model = K3(preset(rung), seed=None)
    found = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert found == published_shapes(preset(rung))


def test_k3_head_blocks():
    config = preset("k3")
    blocks = {a.name: a.rows for a in assign_all(meta(published_shapes(config)), config) if a.rows}
    assert blocks["layers.0.self_attn.q_proj.weight"] == (128,)
    assert blocks["layers.3.self_attn.q_b_proj.weight"] == (192,)
    assert blocks["layers.3.self_attn.kv_b_proj.weight"] == (128, 128)
    assert blocks["layers.92.self_attn.g_proj.weight"] == (128,)
    assert blocks["layers.92.block_sparse_moe.experts.w1"] == (3072,)


@pytest.mark.parametrize(
    ("name", "kind", "rows"),
    [
        ("vision_tower.encoder.blocks.0.norm0.weight", "plain", ()),
        ("vision_tower.encoder.final_layernorm.weight", "plain", ()),
        ("vision_tower.patch_embed.pos_emb.weight", "plain", ()),
        ("vision_tower.patch_embed.proj.weight", "matrix", ()),
        ("vision_tower.encoder.blocks.0.wqkv.weight", "muon", (128,)),
        ("vision_tower.encoder.blocks.26.wo.weight", "muon", (1024,)),
        ("vision_tower.encoder.blocks.0.mlp.fc0.weight", "muon", (4096,)),
        ("mm_projector.post_norm.weight", "plain", ()),
        ("mm_projector.proj.2.weight", "muon", (7168,)),
    ],
)
def test_vision(name, kind, rows):
    config = preset("k3")
    with torch.device("meta"):
        shapes = {n: tuple(p.shape) for n, p in eyes(config).items()}
    found = assign(name, torch.empty(shapes[name], device="meta"), config)
    assert (found.kind, found.rows) == (kind, rows)


def test_every_vision_parameter_once():
    config = preset("k3")
    with torch.device("meta"):
        parameters = eyes(config)
    found = assign_all(parameters.items(), config)
    assert [a.name for a in found] == list(parameters)
    assert sum(a.kind == "muon" for a in found) == 27 * 4 + 2


def eyes(config):
    """Vision parameters by name."""
    both = torch.nn.ModuleDict(
        {"vision_tower": VisionTower(config.vision), "mm_projector": Projector(config.vision)}
    )
    return dict(both.named_parameters())


def test_prefixes_do_not_matter():
    q = torch.empty(128, 128)
    for prefix in ("", "model.", "language_model.model."):
        assert assign(f"{prefix}layers.0.self_attn.q_proj.weight", q, NANO).rows == (32,)


def test_unknown_names_and_shapes_are_refused():
    with pytest.raises(InputError, match=r"no optimizer group.*'layers.0.surprise'"):
        assign("layers.0.surprise", torch.empty(4), NANO)
    with pytest.raises(InputError, match=r"100 rows.*\(32,\)"):
        assign("layers.0.self_attn.q_proj.weight", torch.empty(100, 128), NANO)
    with pytest.raises(InputError, match="Muon takes matrices"):
        assign("layers.0.self_attn.q_proj.weight", torch.empty(128), NANO)


def test_every_rule_is_used():
    vision = [
        "vision_tower.a.norm0.weight",
        "vision_tower.patch_embed.proj.weight",
        "vision_tower.a.wqkv.weight",
        "mm_projector.proj.0.weight",
        "layers.9.eh_proj.weight",
    ]
    names = [*published_shapes(NANO), *vision]
    first = {next(i for i, (p, _, _) in enumerate(RULES) if re.fullmatch(p, n)) for n in names}
    assert first == set(range(len(RULES)))
