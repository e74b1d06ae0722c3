"""Single layers against the authors' own code, at the tolerances of README.md."""

import pytest
import torch
from torch import nn

from openk3.config import ModelConfig
from openk3.model.kda import KimiDeltaAttention
from openk3.model.mla import GatedMLA
from openk3.model.moe import LatentMoE
from openk3.model.ports import Context, KdaState, LocalSequence
from openk3.ops.attn_res import mix
from openk3.ops.mla import attend, expand
from openk3.ops.moe import situ_glu


def fill(module: nn.Module, tensors, prefix="weight/") -> None:
    """Load published names; experts of a layer are stacked."""
    state = module.state_dict()
    for name in state:
        if name.startswith("experts."):
            kind, num = name.split(".")[1], state[name].shape[0]
            state[name] = torch.stack(
                [tensors[f"{prefix}experts.{e}.{kind}.weight"] for e in range(num)]
            )
        else:
            state[name] = tensors[prefix + name].view_as(state[name])
    module.load_state_dict(state)
    module.eval()


def close(ours, theirs, atol):
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


class OneLayer:
    """A MixerState for a single KDA layer."""

    def __init__(self, state=None):
        self.state = state

    def kda(self, layer):
        return self.state

    def set_kda(self, layer, state):
        self.state = state


@torch.no_grad()
def test_kda_layer(golden):
    description, t = golden("kda")
    layer = KimiDeltaAttention(ModelConfig.from_hf(description["config"]), 0)
    fill(layer, t)

    def run(x, memory):
        return layer(x, Context(LocalSequence(), memory))

    memory = OneLayer()
    close(run(t["input/A_x"], memory), t["output/A_y"], 5e-6)
    close(memory.state.S, t["output/A_state_KV"], 5e-6)
    for name in ("q", "k", "v"):
        conv = getattr(memory.state, f"conv_{name}").transpose(1, 2)
        close(conv, t[f"output/A_conv_{name}"], 5e-6)
    steps = [run(t["input/C_x"][:, i : i + 1], memory) for i in range(3)]
    close(torch.cat(steps, 1), t["output/C_y"], 5e-6)
    close(memory.state.S, t["output/C_state_KV"], 5e-6)

    convs = [t[f"input/B_conv_{name}"].transpose(1, 2) for name in ("q", "k", "v")]
    memory = OneLayer(KdaState(*convs, t["input/B_state_KV"]))
    close(run(t["input/B_x"], memory), t["output/B_y"], 5e-6)
    close(memory.state.S, t["output/B_state_KV"], 5e-6)


@torch.no_grad()
def test_kda_left_padding_is_a_shorter_row(golden):
    description, t = golden("kda")
    layer = KimiDeltaAttention(ModelConfig.from_hf(description["config"]), 0)
    fill(layer, t)
    pad = int((t["input/D_mask"][1] == 0).sum())
    y = layer(t["input/A_x"][1:, pad:], Context())
    close(y, t["output/D_y"][1:, pad:], 5e-6)


@torch.no_grad()
def test_mla_layer_in_both_forms(golden):
    description, t = golden("mla")
    config = ModelConfig.from_hf(description["config"])
    layer = GatedMLA(config, 3)
    fill(layer, t)
    close(layer(t["input/x"], Context()), t["output/y"], 5e-6)
    q = t["diag/q"].unflatten(-1, (4, 24))
    latent, k_rope = t["diag/kv_a"].split([16, 8], -1)
    latent = layer.kv_a_layernorm(latent)
    k, v = expand(latent, k_rope, layer.kv_b_proj.weight, 4, 16)
    close(k.transpose(1, 2), t["diag/key_states"], 5e-6)
    close(v.transpose(1, 2), t["diag/value_states"], 5e-6)
    both = [
        attend(q, latent, k_rope, layer.kv_b_proj.weight, form=form)
        for form in ("expanded", "absorbed")
    ]
    close(both[0], both[1], 5e-6)


@torch.no_grad()
def test_latent_moe_layer(golden):
    description, t = golden("latent_moe")
    layer = LatentMoE(ModelConfig.from_hf(description["config"]), 1)
    fill(layer, t)
    x = t["input/x"]
    down = layer.routed_expert_down_proj.weight
    routing = layer.gate(x.flatten(0, 1), down, None)
    ids, order = routing.ids.sort(-1)
    assert torch.equal(ids, t["output/topk_ids_sorted"])
    close(routing.weights.gather(1, order), t["output/topk_weights"], 5e-6)
    close(layer(x, Context()), t["output/y"], 5e-6)


@pytest.mark.parametrize("case", [0, 1])
@torch.no_grad()
def test_attn_res(golden, case):
    description, t = golden("attn_res")
    block = description["cases"][case]["attn_res_block_size_layers"]

    def mixed(name, bank, p):
        norm, proj = (t[f"weight/{case}_{name}_{part}.weight"] for part in ("norm", "proj"))
        return mix([*bank, p], proj, norm, 1e-5)

    bank, p = [], t[f"input/{case}_embedding"]
    for i in range(description["cases"][case]["layers"]):
        prefix = f"layers.{i}."
        h = mixed(f"{prefix}self_attention_res", bank, p) if bank else p
        close(h, t[f"output/{case}_attn_in.{i}"], 3e-6)
        a = t[f"input/{case}_attn_out.{i}"]
        if i % block == 0:
            bank, p = [*bank, p], a
        else:
            p = p + a
        close(mixed(f"{prefix}mlp_res", bank, p), t[f"output/{case}_mlp_in.{i}"], 3e-6)
        p = p + t[f"input/{case}_mlp_out.{i}"]


@pytest.mark.parametrize(
    ("name", "betas"),
    [
        ("b4_lb25", (4.0, 25.0)),
        ("b4_none", (4.0, None)),
        ("b1_none", (1.0, None)),
        ("b2p5_lb7", (2.5, 7.0)),
    ],
)
def test_situ(golden, name, betas):
    _, t = golden("situ")
    ours = situ_glu(t["input/gate"], t["input/up"], *betas)
    torch.testing.assert_close(ours, t[f"output/{name}"], rtol=1e-6, atol=1e-6)


def test_situ_in_bf16_is_float32_rounded_once(golden):
    _, t = golden("situ")
    ours = situ_glu(t["input/gate"].bfloat16(), t["input/up"].bfloat16())
    assert torch.equal(ours, t["output/b4_lb25_bf16"].to(torch.bfloat16))
