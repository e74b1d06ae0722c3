"""Packed, streamed and fake-quantised experts against the resident ones."""

import pytest
import torch
from safetensors.torch import load_file

import openk3
from conftest import GOLDEN_SHARED
from model_folders import CONFIG
from openk3.checkpoint.experts import (
    PackedExperts,
    QatExperts,
    fake_quantise_experts,
    stream_stats,
)
from openk3.checkpoint.hf.layout import EXPERT_MATRICES
from openk3.errors import CheckpointError, InputError
from openk3.model import K3
from openk3.ops import moe, mx

IDS = torch.arange(24).view(1, 24)
SLOT = 3 * (64 * 32 // 2 + 64)  # bytes of one packed expert
GOLDEN = GOLDEN_SHARED / "golden_mx" / "qat_linear.safetensors"


def streamed(folder, slots, **options):
    return openk3.load(folder, experts="stream", expert_cache_gb=slots * SLOT / 1e9, **options)


@pytest.mark.parametrize("slots", [2.0, 3.5, 9.0, 100.0])
@torch.no_grad()
def test_cache_size_and_prediction_never_change_a_bit(folder, slots):
    want = openk3.load(folder, dtype=torch.float32).generate(IDS, max_new_tokens=6, temperature=0)
    model = streamed(folder, slots, dtype=torch.float32)
    assert torch.equal(model.generate(IDS, max_new_tokens=6, temperature=0), want)
    blind = streamed(folder, slots, dtype=torch.float32)
    for layer in blind.layers[1:]:
        layer.block_sparse_moe.experts.predict_next = tuple
    assert torch.equal(blind.generate(IDS, max_new_tokens=6, temperature=0), want)
    assert stream_stats(blind).predictions == 0
    assert stream_stats(model).predictions > 0 or slots < 3


@torch.no_grad()
def test_prediction_finds_experts_before_they_are_used(folder):
    model = streamed(folder, 4, dtype=torch.float32)
    model.generate(IDS[:, :4], max_new_tokens=12, temperature=0)
    stats = stream_stats(model)
    assert stats.predicted > 0
    assert stats.hit_rate > 0
    assert f"{stats.hit_rate:.1%} hits" in str(stats)


def test_a_folder_cut_short_while_streaming_is_named(folder):
    model = streamed(folder, 3)
    for shard in folder.glob("*.safetensors"):
        with open(shard, "r+b") as handle:
            handle.truncate(100)
    with torch.no_grad(), pytest.raises(CheckpointError, match=r"experts\.\d\.w. is cut short|cut"):
        model.layers[2].block_sparse_moe.experts.routed(
            torch.randn(2, 32), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
        )


def test_streamed_experts_refuse_training(folder):
    model = streamed(folder, 3, dtype=torch.float32).train()
    with pytest.raises(InputError, match="cannot be trained"):
        model(IDS)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_packed_experts_compute_the_dequantised_product(tokens):
    rng = torch.Generator().manual_seed(tokens)
    shapes = {"w1": (6, 64, 32), "w3": (6, 64, 32), "w2": (6, 32, 64)}
    stacks = {m: mx.quantize(torch.randn(shapes[m], generator=rng)) for m in EXPERT_MATRICES}
    packed = PackedExperts(CONFIG, stacks)
    x = torch.randn(tokens, 32, generator=rng)
    ids = torch.stack([torch.randperm(6, generator=rng)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2, generator=rng)
    dense = {m: mx.dequantize(*q).double() for m, q in stacks.items()}
    want = torch.zeros(tokens, 32, dtype=torch.float64)
    for t in range(tokens):
        for j, e in enumerate(ids[t].tolist()):
            row = x[t].double()
            inner = moe.situ_glu(dense["w1"][e] @ row, dense["w3"][e] @ row, 4.0, 25.0)
            want[t] += weights[t, j].double() * (dense["w2"][e] @ inner)
    scale = want.abs().max()
    ours = packed.routed(x, ids, weights).double()
    torch.testing.assert_close(ours / scale, want / scale, atol=1e-5, rtol=0)


def test_no_rows_and_one_expert_only():
    shapes = {"w1": (6, 64, 32), "w3": (6, 64, 32), "w2": (6, 32, 64)}
    packed = PackedExperts(CONFIG, {m: mx.quantize(torch.ones(s)) for m, s in shapes.items()})
    empty = packed.sorted_rows(torch.zeros(0, 32), torch.zeros(6, dtype=torch.int32))
    assert empty.shape == (0, 32)
    offsets = torch.tensor([0, 0, 0, 3, 3, 3], dtype=torch.int32)
    assert packed.sorted_rows(torch.ones(3, 32), offsets).shape == (3, 32)


def test_qat_trains_the_masters_through_the_formats():
    model = fake_quantise_experts(K3(CONFIG, seed=0)).train()
    experts = model.layers[1].block_sparse_moe.experts
    assert isinstance(experts, QatExperts)
    assert set(model.state_dict()) == set(K3(CONFIG, seed=0).state_dict())
    model(IDS).square().mean().backward()
    assert experts.w1.grad.abs().sum() > 0
    assert experts.w2.grad.shape == experts.w2.shape


def test_qat_only_touches_the_routed_experts():
    plain, qat = K3(CONFIG, seed=0), fake_quantise_experts(K3(CONFIG, seed=0))
    with torch.no_grad():
        for layer in (*plain.layers[1:], *qat.layers[1:]):
            for matrix in EXPERT_MATRICES:
                weight = getattr(layer.block_sparse_moe.experts, matrix)
                weight.copy_(mx.fake_quantize(weight))
        without_inputs = fake_quantise_experts(qat, mxfp8_inputs=False)
        assert torch.equal(plain(IDS), without_inputs(IDS))


@pytest.mark.skipif(not GOLDEN.exists(), reason=f"{GOLDEN} is not on this machine")
def test_qat_products_match_the_reference():
    """x in MXFP8 (rceil), w in MXFP4 (even): each operand equals the reference's."""
    t = load_file(GOLDEN)
    assert torch.equal(mx.fake_quantize(t["x"], "mxfp8"), t["rceil/x_fq"])
    assert torch.equal(mx.fake_quantize(t["w"]), t["even/w_fq"])
