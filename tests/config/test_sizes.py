"""Counts are exact: those of K3 are published, those of small models can be added up by hand."""

import re

import pytest
import torch

from openk3.config import LADDER, preset, sizes
from openk3.model.k3 import K3

PLACES = {
    r"^vision_tower\.": "vision tower",
    r"^mm_projector\.": "vision projector",
    r"embed_tokens": "input embedding",
    r"lm_head": "output head",
    r"^norm\.": "final norm",
    r"_res_|layernorm\.weight$(?<!_a_layernorm\.weight)": "AttnRes and norms",
    r"self_attn\.": "attention",
    r"block_sparse_moe\.gate\.": "router",
    r"routed_expert_": "latent in and out",
    r"shared_experts\.": "shared experts",
    r"\.experts\.": "routed experts",
    r"\.mlp\.": "dense FFN",
}
"""Parameter names -> the part that must count them."""


def test_k3_totals_are_the_published_ones():
    config = preset("k3")
    assert sizes.total_params(config) == 2_779_931_837_184
    assert sizes.total_params(config, vision=False) == 2_779_484_478_208
    assert sizes.activated_params(config) == 104_189_614_848
    by_name = {part.name: part for part in sizes.parts(config)}
    assert by_name["vision tower"].params == 401_214_464
    assert by_name["vision projector"].params == 46_144_512
    assert sizes.activated_params(config) + by_name["input embedding"].params == 105_364_019_968


def test_k3_file_bytes_are_the_published_ones():
    config = preset("k3")
    assert sizes.weight_bytes(config, mxfp4_experts=True) == 1_560_860_324_864


def test_k3_memory():
    memory = sizes.sequence_memory(preset("k3"))
    assert memory.kda_state == 69 * 96 * 128 * 128 * 4
    assert memory.conv_state == 69 * 3 * 12288 * 3 * 2
    assert memory.mla_per_token == 24 * 576 * 2
    assert memory.at(10) == memory.kda_state + memory.conv_state + 276_480


def test_sources_of_mixes():
    counts = sizes.sources_of_mixes(preset("k3"))
    assert len(counts) == 2 * 93 + 1
    assert counts[:4] == [0, 2, 2, 2]  # layer 0 has nothing to mix before its attention
    assert counts[24:26] == [2, 3]  # layer 12 starts a block after its first mix
    assert counts[-1] == 9


def test_flops():
    config = preset("k3")
    # Two FLOPs per weight of the activated matrices, and some for the recurrence and the mixes.
    assert sizes.flops_per_token(config) == pytest.approx(2 * sizes.activated_params(config), 0.01)
    assert sizes.flops_per_token(config) > 2 * sizes.activated_params(config)
    slope = sizes.flops_per_token(config, 1001) - sizes.flops_per_token(config, 1)
    assert slope == 1000 * 2 * 24 * 96 * (192 + 128)
    train = sizes.training_flops_per_token(config, 1001)
    assert train == 3 * sizes.flops_per_token(config, 501)


@pytest.mark.parametrize("name", LADDER)
def test_every_part_counts_what_the_real_model_holds(name):
    config = preset(name)
    with torch.device("meta"):
        model = K3(config, seed=None)
    places = [part for part in PLACES.values() if config.vision or "vision" not in part]
    counted = dict.fromkeys(places, 0)
    tensors = [*model.named_parameters()]
    tensors += [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    for path, tensor in tensors:
        part = next(part for pattern, part in PLACES.items() if re.search(pattern, path))
        if part == "attention":
            layer = int(path.split(".")[1])
            part = "KDA" if config.is_kda(layer) else "Gated MLA"
        counted[part] = counted.get(part, 0) + tensor.numel()
    heads, (num_kda, *_) = config.linear_attn.num_heads, sizes.layer_counts(config)
    counted["KDA"] += num_kda * (sizes.stored_a_log(heads) - heads)
    del counted["attention"]
    assert counted == {part.name: part.params for part in sizes.parts(config)}
