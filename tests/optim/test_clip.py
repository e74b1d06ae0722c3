"""Weight clipping: heads above tau come down to it, nothing else moves."""

import pytest
import torch

from openk3.config import preset
from openk3.errors import InputError
from openk3.optim.clip import clip_mla_weights

C = preset("nano")
H, NOPE, ROPE, V = C.num_attention_heads, C.qk_nope_head_dim, C.qk_rope_head_dim, C.v_head_dim
Q, KV = "layers.3.self_attn.q_b_proj.weight", "layers.3.self_attn.kv_b_proj.weight"


def weights():
    g = torch.Generator().manual_seed(0)
    return {
        Q: torch.randn(H * (NOPE + ROPE), C.q_lora_rank, generator=g),
        KV: torch.randn(H * (NOPE + V), C.kv_lora_rank, generator=g),
        "layers.0.self_attn.q_proj.weight": torch.randn(128, 128, generator=g),
    }


def logits(w, q_latent, kv_latent, k_rope):
    """Largest logit per head of expanded MLA on the latents [T, rank], float64."""
    q = (q_latent @ w[Q].double().T).unflatten(-1, (H, -1))
    k_nope = (kv_latent @ w[KV].double().T).unflatten(-1, (H, -1))[..., :NOPE]
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, H, -1)], -1)
    return torch.einsum("ihd,jhd->hij", q, k).flatten(1).amax(1) / C.qk_head_dim**0.5


def test_offending_heads_come_down_to_tau_exactly():
    w, g = weights(), torch.Generator().manual_seed(1)
    latents = [
        torch.randn(9, n, generator=g, dtype=torch.float64)
        for n in (C.q_lora_rank, C.kv_lora_rank, ROPE)
    ]
    before = logits(w, *latents)
    tau = before.median().item()
    old = {n: t.clone() for n, t in w.items()}
    clipped = clip_mla_weights(w, {3: before.float()}, C, tau)
    over = before > tau
    assert clipped.item() == over.sum().item() > 0
    after = logits(w, *latents)
    torch.testing.assert_close(after[over], torch.full_like(after[over], tau), atol=1e-4, rtol=0)
    torch.testing.assert_close(after[~over], before[~over], atol=0, rtol=0)
    values = slice(NOPE, None)
    heads = w[KV].unflatten(0, (H, -1))[:, values], old[KV].unflatten(0, (H, -1))[:, values]
    assert torch.equal(*heads)
    assert torch.equal(
        w["layers.0.self_attn.q_proj.weight"], old["layers.0.self_attn.q_proj.weight"]
    )


@pytest.mark.parametrize("value", [-1.0, 0.0, -0.0, 99.9, 100.0, float("-inf")])
def test_never_scales_up_and_never_makes_nan(value):
    w = weights()
    old = {n: t.clone() for n, t in w.items()}
    assert clip_mla_weights(w, {3: torch.full((H,), value)}, C, 100.0).item() == 0
    assert all(torch.equal(w[n], old[n]) for n in w)


def test_no_mla_layer_is_a_no_op():
    assert clip_mla_weights(weights(), {}, C, 100.0).item() == 0


def test_wrong_shape_or_layer_is_named():
    with pytest.raises(InputError, match=r"layer 3 has shape \(2,\)"):
        clip_mla_weights(weights(), {3: torch.ones(2)}, C, 100.0)
    with pytest.raises(InputError, match=r"no weight layers\.0\.self_attn\.q_b_proj"):
        clip_mla_weights(weights(), {0: torch.ones(H)}, C, 100.0)


@pytest.mark.parametrize("cut", [7, H * (NOPE + ROPE) // 2 + 3])
def test_rows_of_a_sharded_weight_are_scaled_as_the_whole_is(cut):
    whole, peaks = weights(), {3: torch.tensor([50.0, 400.0, 0.0, 120.0])}
    parts = [{n: t[:cut].clone() for n, t in whole.items()}]
    parts += [{n: t[cut:].clone() for n, t in whole.items()}]
    clip_mla_weights(whole, peaks, C, 100.0)
    for i, part in enumerate(parts):
        rows = {n: ((0, cut), (cut, len(t)))[i] for n, t in whole.items()}
        assert clip_mla_weights(part, peaks, C, 100.0, rows) == 2
    for name, t in whole.items():
        assert torch.equal(torch.cat([p[name] for p in parts]), t)
