"""The 4-bit decode kernels in Triton's interpreter against the same weights dequantised."""

import pytest
import torch

from kernel_checks import relative_error
from openk3.errors import InputError
from openk3.ops import mx
from openk3.ops.moe import expert_mlp

mxfp4 = pytest.importorskip("openk3.ops.moe.mxfp4", exc_type=ImportError)
layout = pytest.importorskip("openk3.ops.moe.mxfp4_layout", exc_type=ImportError)


def experts(num_experts=4, latent=128, inner=128, seed=0, spread=2.0):
    """(packed experts, the same three matrices in float64), scales differing between blocks."""
    rng = torch.Generator().manual_seed(seed)
    packed, exact = [], []
    for rows, columns in ((inner, latent), (inner, latent), (latent, inner)):
        w = torch.randn(num_experts, rows, columns, generator=rng) / columns**0.5
        w *= (
            torch.exp(spread * torch.randn(num_experts, rows, columns // 32, 1, generator=rng))
            .expand(-1, -1, -1, 32)
            .reshape(w.shape)
        )
        data, scale = mx.quantize(w)
        packed.append((data, scale))
        exact.append(mx.dequantize(data, scale).double())
    return layout.pack_experts(*packed), exact


def routing(num_tokens, top_k, num_experts, seed=1):
    rng = torch.Generator().manual_seed(seed)
    ids = torch.stack(
        [torch.randperm(num_experts, generator=rng)[:top_k] for _ in range(num_tokens)]
    )
    return ids, torch.rand(num_tokens, top_k, generator=rng)


@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (3, 2), (11, 3)])
def test_equals_the_dequantised_experts(num_tokens, top_k):
    packed, (w1, w3, w2) = experts()
    ids, weights = routing(num_tokens, top_k, 4)
    x = 3 * torch.randn(num_tokens, 128, generator=torch.Generator().manual_seed(2))
    x[0, :5] *= 1000  # one row of a wide range
    got = mxfp4.mxfp4_expert_mlp(x, ids, weights, packed)
    wanted = expert_mlp(x.double(), ids, weights.double(), w1, w3, w2)
    # float32 inputs lose 11 bits to float16; bfloat16 ones would lose none
    assert relative_error(got, wanted) < 1e-3


def test_mxfp8_activations_round_as_the_format_does():
    packed, (w1, w3, w2) = experts(seed=3)
    ids, weights = routing(3, 1, 4)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(4))
    got = mxfp4.mxfp4_expert_mlp(x, ids, weights, packed, activations="mxfp8")
    rounded = mx.fake_quantize(x, "mxfp8").double()
    gate = torch.stack([w1[e] @ rounded[t] for t, e in enumerate(ids[:, 0])])
    up = torch.stack([w3[e] @ rounded[t] for t, e in enumerate(ids[:, 0])])
    act = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    act = mx.fake_quantize(act.float(), "mxfp8").double()
    wanted = torch.stack([w2[e] @ act[t] for t, e in enumerate(ids[:, 0])]) * weights
    assert relative_error(got, wanted) < 1e-3


def test_plan_lists_each_pair_once_under_its_expert():
    ids, _ = routing(5, 3, 7)
    active, starts, pairs = mxfp4._plan(ids, 7, 7)
    flat = ids.flatten()
    chosen = sorted(set(flat.tolist()))
    assert active[: len(chosen)].tolist() == chosen
    assert starts[len(chosen) :].tolist() == [15] * (8 - len(chosen))
    assert sorted(pairs.tolist()) == list(range(15))
    for slot, expert in enumerate(chosen):
        assert flat[pairs[starts[slot] : starts[slot + 1]].long()].tolist() == [expert] * int(
            starts[slot + 1] - starts[slot]
        )


def test_wrong_shapes_are_refused():
    packed, _ = experts()
    ids, weights = routing(2, 1, 4)
    with pytest.raises(InputError, match=r"x must be \[2, 128\]"):
        mxfp4.mxfp4_expert_mlp(torch.zeros(2, 64), ids, weights, packed)
    with pytest.raises(InputError, match="multiple of 32"):
        layout.pack_matrix(torch.zeros(1, 16, 64).byte(), torch.zeros(1, 16, 4).byte())
    assert mxfp4.mxfp4_expert_mlp(torch.zeros(0, 128), ids[:0], weights[:0], packed).shape == (
        0,
        128,
    )
