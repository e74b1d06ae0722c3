"""Newton-Schulz and Per-Head Muon against a block-by-block float64 reference."""

import math

import pytest
import torch

from openk3.optim import muon as muon_module
from openk3.optim.muon import Muon, MuonParameter
from openk3.optim.newton_schulz import COEFFICIENTS, orthogonalize


def reference(m, steps=5):
    """One matrix, float64, straight from the definition."""
    a, b, c = COEFFICIENTS
    x = m.double() / (m.double().norm() + 1e-7)
    for _ in range(steps):
        x = a * x + (b * (x @ x.T) + c * (x @ x.T) @ (x @ x.T)) @ x
    return x


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 8, 20), (3, 20, 8), (2, 16, 16), (5, 1, 7)])
def test_batch_equals_reference(shape):
    m = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    got = orthogonalize(m)
    want = torch.stack([reference(x) for x in m]).float()
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def test_singular_values_become_about_one():
    m = torch.randn(4, 32, 128, generator=torch.Generator().manual_seed(1))
    s = torch.linalg.svdvals(orthogonalize(m))
    assert s.min().item() > 0.6
    assert s.max().item() < 1.25


def test_scale_of_the_gradient_does_not_matter_and_zero_stays_zero():
    m = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(orthogonalize(m * 1e4), orthogonalize(m), atol=1e-5, rtol=0)
    assert not orthogonalize(torch.zeros(2, 8, 12)).any()


def blocks_of(name, w):
    """The cut matrices of the little model below, as a list of views."""
    if name == "per_head":
        return list(w.split(8))
    if name == "kv":
        return [piece for head in w.split(10) for piece in (head[:6], head[6:])]
    return list(w) if w.ndim == 3 else [w]


def little_model():
    g = torch.Generator().manual_seed(3)
    return {
        "per_head": (torch.randn(32, 24, generator=g), (8,)),
        "kv": (torch.randn(40, 16, generator=g), (6, 4)),
        "experts": (torch.randn(5, 12, 8, generator=g), (12,)),
        "whole": (torch.randn(24, 32, generator=g), (24,)),
    }


@pytest.mark.parametrize("max_batch", [1 << 27, 300, 100])
def test_steps_equal_the_block_by_block_reference(monkeypatch, max_batch):
    monkeypatch.setattr(muon_module, "CPU_BATCH_ELEMENTS", max_batch)
    lr, mu, wd = 0.02, 0.95, 0.1
    model = little_model()
    weights = {n: w.clone().requires_grad_() for n, (w, _) in model.items()}
    muon = Muon(
        [MuonParameter(n, weights[n], rows) for n, (_, rows) in model.items()],
        momentum=mu,
        weight_decay=wd,
    )
    want = {n: w.double().clone() for n, (w, _) in model.items()}
    momentum = {n: torch.zeros_like(w) for n, w in want.items()}
    g = torch.Generator().manual_seed(4)
    for _ in range(3):
        for name, w in weights.items():
            w.grad = torch.randn(w.shape, generator=g)
            momentum[name] = mu * momentum[name] + w.grad.double()
            update = w.grad.double() + mu * momentum[name]
            want[name] *= 1 - lr * wd
            pairs = zip(blocks_of(name, want[name]), blocks_of(name, update), strict=True)
            for block, u in pairs:
                block -= lr * 0.2 * math.sqrt(max(block.shape)) * reference(u)
        muon.step(lr)
    for name, w in weights.items():
        torch.testing.assert_close(w.detach(), want[name].float(), atol=2e-5, rtol=0)


def test_update_has_rms_a_fifth_of_the_rate():
    w = torch.zeros(4 * 32, 128, requires_grad=True)
    w.grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(5))
    Muon([MuonParameter("q", w, (32,))], weight_decay=0.0).step(1.0)
    rms = w.detach().square().mean().sqrt().item()
    assert 0.15 < rms < 0.25


def test_a_weight_without_gradient_keeps_its_momentum_going():
    w = torch.zeros(8, 8, requires_grad=True)
    muon = Muon([MuonParameter("w", w, (8,))], weight_decay=0.0)
    muon.step(1.0)
    assert not w.detach().any()
    w.grad = torch.eye(8)
    muon.step(1.0)
    before = w.detach().clone()
    w.grad = None
    muon.step(1.0)
    assert not torch.equal(w.detach(), before)
