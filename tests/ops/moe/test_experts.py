"""Grouped experts against a loop, with idle experts, and their gradients in float64."""

import pytest
import torch

from openk3.errors import InputError
from openk3.ops.moe import expert_mlp, route, situ_glu
from openk3.ops.norm import rms_norm

F64 = torch.float64


def looped(x, ids, weights, w1, w3, w2):
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            e = ids[t, j]
            out[t] += weights[t, j] * (w2[e] @ situ_glu(w1[e] @ x[t], w3[e] @ x[t]))
    return out


@pytest.mark.parametrize(("tokens", "latent", "inner"), [(1, 8, 4), (7, 8, 12), (33, 6, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_equals_a_loop_over_tokens(tokens, latent, inner, dtype):
    torch.manual_seed(tokens)
    x = torch.randn(tokens, latent, dtype=dtype)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(tokens)])
    ids[ids == 3] = 5  # expert 3 of 6 stays idle
    weights = torch.rand(tokens, 2, dtype=dtype)
    w1, w3 = (torch.randn(6, inner, latent, dtype=dtype) for _ in range(2))
    w2 = torch.randn(6, latent, inner, dtype=dtype)
    ours = expert_mlp(x, ids, weights, w1, w3, w2)
    torch.testing.assert_close(ours, looped(x, ids, weights, w1, w3, w2))


def test_gradients_and_exact_zeros_of_idle_experts():
    torch.manual_seed(0)
    ids = torch.tensor([[0, 2], [2, 0], [2, 1]])
    tensors = [torch.randn(3, 4, dtype=F64), torch.rand(3, 2, dtype=F64)]
    tensors += [torch.randn(4, *s, dtype=F64) for s in ((6, 4), (6, 4), (4, 6))]
    tensors = [t.requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(lambda x, w, *e: expert_mlp(x, ids, w, *e), tensors)
    expert_mlp(tensors[0], ids, *tensors[1:]).sum().backward()
    assert all(not t.grad[3].any() for t in tensors[2:])


@pytest.mark.parametrize("beta2", [25.0, None])
def test_situ_gradients_and_bound(beta2):
    gate, up = (torch.randn(5, 7, dtype=F64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda g, u: situ_glu(g * 5, u * 30, 4.0, beta2), (gate, up))
    if beta2 is not None:
        assert situ_glu(torch.full((1,), 1e4), torch.full((1,), 1e4)).item() == pytest.approx(100)


def test_wrong_shapes_are_refused():
    x, ids, weights = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    w1, w2 = torch.zeros(4, 6, 8), torch.zeros(4, 8, 6)
    assert expert_mlp(x, ids, weights, w1, w1, w2).shape == (3, 8)
    for bad in (
        (x[:, :4], ids, weights, w1, w1, w2),
        (x[:2], ids, weights, w1, w1, w2),
        (x, ids, weights[:, :1], w1, w1, w2),
    ):
        with pytest.raises(InputError, match=r"must be \[T, 8\]"):
            expert_mlp(*bad)
    for bad in ((x, ids, weights, w1, w1[:3], w2), (x, ids, weights, w1, w1, w1)):
        with pytest.raises(InputError, match=r"\[E, L, F\]"):
            expert_mlp(*bad)
    with pytest.raises(InputError, match="alike"):
        situ_glu(x, x[:2])
    with pytest.raises(InputError, match="alike"):
        situ_glu(x, x.double())
    with pytest.raises(InputError, match=r"\[E, d\]"):
        route(x, torch.zeros(4, 7), torch.zeros(4), 2)
    with pytest.raises(InputError, match="between 1 and"):
        route(x, torch.zeros(4, 8), torch.zeros(4), 4)
    with pytest.raises(InputError, match="width of x"):
        rms_norm(x, torch.zeros(7), 1e-5)
