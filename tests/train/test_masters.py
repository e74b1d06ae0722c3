"""Float32 masters of a bfloat16 model."""

import pytest
import torch

from openk3.errors import CheckpointError
from openk3.model.init import keeps_float32
from openk3.model.k3 import K3
from openk3.train.masters import Masters
from tiny_run import tiny_config


def test_float32_masters_are_the_parameters():
    model = K3(tiny_config())
    masters = Masters(model, torch.float32)
    assert all(masters.weights[n] is p for n, p in model.named_parameters())


def test_bfloat16_keeps_float32_masters_and_float32_parameters():
    model, full = K3(tiny_config()), K3(tiny_config())
    masters = Masters(model, torch.bfloat16)
    exact = dict(full.named_parameters())
    for name, p in model.named_parameters():
        kept = keeps_float32(name)
        assert p.dtype == (torch.float32 if kept else torch.bfloat16)
        assert torch.equal(masters.weights[name], exact[name])
        assert (masters.weights[name] is p) == kept
    assert list(masters.weights) == list(exact)


def test_gradients_of_micro_batches_add_up_in_float32():
    model = K3(tiny_config())
    masters = Masters(model, torch.bfloat16)
    small = 1e-3
    for scale in (1.0, small, small):
        model.norm.weight.sum().mul(scale).backward()
    assert model.norm.weight.grad is None
    rounded = torch.tensor(small, dtype=torch.bfloat16).item()
    # bfloat16 would have swallowed the small ones: 1 + 0.001 rounds to 1
    want = torch.full((32,), 1 + 2 * rounded)
    torch.testing.assert_close(masters.weights["norm.weight"].grad, want, atol=1e-7, rtol=0)


def test_publish_rounds_to_nearest():
    model = K3(tiny_config())
    masters = Masters(model, torch.bfloat16)
    with torch.no_grad():
        masters.weights["norm.weight"].fill_(1.003)
    masters.publish()
    assert torch.equal(model.norm.weight, torch.full((32,), 1.003).bfloat16())


def test_missing_gradients_are_zeros_in_model_order():
    model = K3(tiny_config())
    masters = Masters(model, torch.float32)
    model.norm.weight.sum().backward()
    grads = masters.grads()
    assert [g.shape for g in grads] == [w.shape for w in masters.weights.values()]
    assert sum(bool(g.any()) for g in grads) == 1
    masters.clear_grads()
    assert all(w.grad is None for w in masters.weights.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_includes_buffers(dtype):
    model = K3(tiny_config())
    masters = Masters(model, dtype)
    name = "layers.1.block_sparse_moe.gate.e_score_correction_bias"
    dict(model.named_buffers())[name].fill_(0.25)
    saved = {n: t.detach().clone() for n, t in masters.state().items()}
    assert name in saved
    assert set(saved) == set(model.state_dict())
    other = K3(tiny_config(), seed=5)
    copy = Masters(other, dtype)
    copy.load_state(saved)
    for n, t in model.state_dict().items():
        assert torch.equal(t, other.state_dict()[n])
    with pytest.raises(CheckpointError, match=r"norm\.weight.*\(3,\).*\(32,\)"):
        copy.load_state(saved | {"norm.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match="'odd'"):
        copy.load_state(saved | {"odd": torch.ones(3)})
