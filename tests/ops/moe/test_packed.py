"""4-bit experts as the model holds them: permuted in place, read by the kernels, given back."""

from dataclasses import replace

import pytest
import torch

from kernel_checks import relative_error
from openk3.checkpoint.experts import PackedExperts
from openk3.config import preset
from openk3.model.ports import routed_by_sorting
from openk3.ops import mx
from openk3.ops.moe import packed as packed_ops

layout = pytest.importorskip("openk3.ops.moe.mxfp4_layout", exc_type=ImportError)
mxfp4 = pytest.importorskip("openk3.ops.moe.mxfp4", exc_type=ImportError)


def build(latent=128, inner=128, num_experts=4):
    config = replace(
        preset("nano"),
        num_experts=num_experts,
        num_experts_per_token=2,
        routed_expert_hidden_size=latent,
        moe_intermediate_size=inner,
    )
    rng = torch.Generator().manual_seed(0)
    shapes = {"w1": (inner, latent), "w3": (inner, latent), "w2": (latent, inner)}
    stacks = {
        name: mx.quantize(torch.randn(num_experts, n, k, generator=rng) / k**0.5)
        for name, (n, k) in shapes.items()
    }
    return PackedExperts(config, stacks)


def tokens(count=5, latent=128):
    rng = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(4, generator=rng)[:2] for _ in range(count)])
    return torch.randn(count, latent, generator=rng), ids, torch.rand(count, 2, generator=rng)


def test_the_permutation_is_undone_exactly():
    rng = torch.Generator().manual_seed(2)
    published = torch.randint(0, 256, (3, 64, 128), dtype=torch.uint8, generator=rng)
    scale = torch.randint(100, 140, (3, 64, 8), dtype=torch.uint8, generator=rng)
    arranged = published.clone()
    layout.arrange_in_place(arranged)
    assert not torch.equal(arranged, published)
    one, other = layout.as_matrix(arranged, scale), layout.pack_matrix(published, scale)
    assert torch.equal(one.words, other.words)
    assert torch.equal(one.scales, other.scales)
    wanted = mx.dequantize(published, scale)
    assert torch.equal(mxfp4.dequantised(one, torch.float32), wanted)
    layout.arrange_in_place(arranged, back=True)
    assert torch.equal(arranged, published)


def test_the_model_folder_sees_published_bytes_whatever_the_kernels_did():
    experts, (x, ids, weights) = build(), tokens()
    before = {name: t.clone() for name, t in experts.state_dict().items()}
    one = experts.packed("w2", 3).data.clone()
    wanted = routed_by_sorting(experts, x, ids, weights)
    got = experts._kernels(x, ids, weights)
    assert experts.arranged
    assert relative_error(got, wanted) < 1e-3  # float16 inputs
    again = experts.packed("w2", 3)
    assert torch.equal(again.data, one)
    assert torch.equal(routed_by_sorting(experts, x, ids, weights), wanted)
    after = experts.state_dict()
    assert not experts.arranged
    assert all(torch.equal(after[name], t) for name, t in before.items())
    experts.arrange()
    experts.load_state_dict(before)
    assert torch.equal(routed_by_sorting(experts, x, ids, weights), wanted)


@pytest.mark.parametrize("mxfp8", [False, True])
def test_many_tokens_take_dequantised_experts_or_several_passes(monkeypatch, mxfp8):
    experts, (x, ids, weights) = build(), tokens()
    experts.mxfp8_inputs = mxfp8
    few = experts._kernels(x, ids, weights)
    monkeypatch.setattr(mxfp4, "MAX_PAIRS", 4)
    many = experts._kernels(x, ids, weights)
    assert relative_error(many, few) < (1e-6 if mxfp8 else 1e-3)


def test_what_the_kernels_do_not_take():
    ok, why = packed_ops.packed_kernels_run(
        device=torch.device("cuda"), dtype=torch.bfloat16, widths=(192, 128)
    )
    assert not ok
    assert "128 n" in why
