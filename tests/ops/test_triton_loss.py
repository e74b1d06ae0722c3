"""The cross-entropy kernel in the interpreter against torch, padding and large logits included."""

import pytest
import torch

from openk3.ops.loss import IGNORE, chunk_triton

pytest.importorskip("triton")


@pytest.mark.parametrize(("vocab", "scale"), [(7, 1.0), (300, 30.0), (9000, 3.0)])
def test_losses_and_gradients(vocab, scale):
    rng = torch.Generator().manual_seed(vocab)
    logits = scale * torch.randn(4, vocab, generator=rng)
    targets = torch.randint(vocab, (4,), generator=rng)
    targets[1] = IGNORE
    wide = logits.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(wide, targets, reduction="sum")
    (grad,) = torch.autograd.grad(wanted, wide)
    got_grad, got = chunk_triton(logits.clone(), targets)
    torch.testing.assert_close(got.double(), wanted.detach(), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(got_grad.double(), grad, atol=1e-6, rtol=1e-4)
    assert not got_grad[1].any()


def test_all_targets_ignored():
    logits = torch.randn(2, 40)
    grad, loss = chunk_triton(logits, torch.full((2,), IGNORE))
    assert loss == 0
    assert not grad.any()
