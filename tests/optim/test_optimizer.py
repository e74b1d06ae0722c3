"""Optimizer as a whole: groups, decay, state in and out; and the schedule."""

import itertools
import math

import pytest
import torch

from openk3.config.recipe import OptimRecipe
from openk3.errors import CheckpointError
from openk3.optim.adamw import AdamW
from openk3.optim.groups import Assignment
from openk3.optim.optimizer import Optimizer
from openk3.optim.schedule import cosine

ASSIGNMENTS = (
    Assignment("w", "muon", (4,)),
    Assignment("b", "matrix"),
    Assignment("e", "embed"),
    Assignment("n", "plain"),
)


RECIPE = OptimRecipe()


def make(seed=0, recipe=RECIPE):
    g = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(8, 6, generator=g).requires_grad_() for name in ("w", "b", "e", "n")
    }
    return weights, Optimizer(weights, ASSIGNMENTS, recipe)


def grads(weights, seed):
    g = torch.Generator().manual_seed(seed)
    for w in weights.values():
        w.grad = torch.randn(w.shape, generator=g)


def test_decay_reaches_matrices_only():
    weights, optimizer = make(recipe=OptimRecipe(weight_decay=0.5))
    before = {n: w.detach().clone() for n, w in weights.items()}
    for w in weights.values():
        w.grad = torch.zeros_like(w)
    optimizer.step(0.1)
    for name in ("w", "b", "e"):
        torch.testing.assert_close(weights[name].detach(), before[name] * 0.95)
    assert torch.equal(weights["n"].detach(), before["n"])


def test_embedding_rate_has_its_own_scale():
    moved = []
    for scale in (1.0, 0.5):
        weights, optimizer = make(recipe=OptimRecipe(weight_decay=0.0, embed_lr_scale=scale))
        before = weights["e"].detach().clone()
        grads(weights, 1)
        optimizer.step(0.1)
        moved.append(weights["e"].detach() - before)
    torch.testing.assert_close(moved[1], moved[0] * 0.5, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_adamw_is_torchs(weight_decay):
    g = torch.Generator().manual_seed(0)
    ours = {n: torch.randn(5, 3, generator=g).requires_grad_() for n in "ab"}
    theirs = [w.detach().clone().requires_grad_() for w in ours.values()]
    adamw = AdamW(ours, weight_decay=weight_decay)
    peer = torch.optim.AdamW(theirs, betas=(0.9, 0.95), weight_decay=weight_decay)
    for step in range(5):
        lr = 0.1 / (step + 1)
        peer.param_groups[0]["lr"] = lr
        for a, b in zip(ours.values(), theirs, strict=True):
            a.grad = torch.randn(5, 3, generator=g)
            b.grad = a.grad.clone()
        adamw.step(lr)
        peer.step()
    for a, b in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("steps_before", [0, 3])
def test_state_round_trip_is_bitwise(steps_before):
    weights, optimizer = make()
    for i in range(steps_before):
        grads(weights, i)
        optimizer.step(0.01)
    saved = {n: t.clone() for n, t in optimizer.state().items()}
    copies, other = make(seed=9)
    for name, w in copies.items():
        w.data.copy_(weights[name].data)
    other.load_state(saved)
    for i in range(10, 13):
        for ws, opt in ((weights, optimizer), (copies, other)):
            grads(ws, i)
            opt.step(0.02)
    for name, w in weights.items():
        assert torch.equal(w, copies[name])


def test_foreign_state_is_refused_by_name():
    _, optimizer = make()
    state = dict(optimizer.state())
    missing = {n: t for n, t in state.items() if n != "muon.w"}
    with pytest.raises(CheckpointError, match=r"muon\.w"):
        optimizer.load_state(missing)
    with pytest.raises(CheckpointError, match=r"'muon\.w' has shape \(2,\).*\(8, 6\)"):
        optimizer.load_state(state | {"muon.w": torch.zeros(2)})


def test_schedule():
    lrs = [cosine(s, 1000, peak=2.0) for s in range(1, 1001)]
    assert lrs[:10] == pytest.approx([0.2 * i for i in range(1, 11)])
    assert max(lrs) == lrs[9] == 2.0
    assert lrs[504] == pytest.approx(1.0, abs=1e-2)
    assert lrs[-1] == pytest.approx(0.0, abs=1e-12)
    assert all(a > b for a, b in itertools.pairwise(lrs[9:]))
    assert cosine(100, 100, peak=1.0, final_fraction=0.1) == pytest.approx(0.1)
    assert cosine(1, 1, peak=1.0) == 1.0
    assert cosine(1, 3, peak=1.0, warmup_fraction=0.0) < 1.0
    assert math.isclose(cosine(2, 3, peak=1.0), 0.5)
