"""Grouped experts against a loop, with idle experts, and their gradients in float64."""

import pytest
import torch

from openk3.errors import InputError
from openk3.ops.moe import expert_mlp, experts, grouped_linear, route, situ_glu
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


@pytest.mark.parametrize("sizes", [(8, 12), (6, 5)])
def test_rows_of_experts_with_0_and_many_tokens(sizes):
    """By grouped_mm where widths allow it, and piece by piece; rows past the last end are unset."""
    torch.manual_seed(1)
    x, weight = torch.randn(30, sizes[0]), torch.randn(4, sizes[1], sizes[0])
    ends = torch.tensor([5, 5, 12, 28], dtype=torch.int32)
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 0, 7, 16]))
    wanted = torch.einsum("ri,roi->ro", x[:28], weight[owner])
    torch.testing.assert_close(grouped_linear(x, weight, ends)[:28], wanted)
    torch.testing.assert_close(grouped_linear(x, weight, ends.long())[:28], wanted)
    for named, bad in (
        ("R = 28 at most", (x[:28], weight, ends + torch.tensor([0, 0, 0, 12]).int())),
        ("must rise from 0", (x, weight, ends.flip(0))),
        (r"offsets must be \[4\]", (x, weight, ends[:3])),
        (r"rows must be \[30", (x[:, 1:], weight, ends)),
    ):
        with pytest.raises(InputError, match=named):
            grouped_linear(*bad)


@pytest.mark.parametrize("widths", [(8, 12), (6, 5)])
def test_compiled_graphs_do_not_break(widths):
    """The same numbers as without, gradients and exact zeros of an idle expert among them."""
    torch.manual_seed(3)
    torch.compiler.reset()  # other widths are another model, not a dynamic size
    latent, inner = widths
    ids = torch.tensor([[0, 2], [2, 0], [2, 1]])
    tensors = [torch.randn(3, latent), torch.rand(3, 2)]
    tensors += [torch.randn(4, *s) for s in ((inner, latent), (inner, latent), (latent, inner))]
    leaves = [x.requires_grad_() for x in tensors]
    compiled = torch.compile(expert_mlp, backend="aot_eager", fullgraph=True)
    outs = [f(leaves[0], ids, *leaves[1:]) for f in (compiled, expert_mlp)]
    grads = [torch.autograd.grad(o.pow(2).sum(), leaves) for o in outs]
    for a, b in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        torch.testing.assert_close(a, b)
    assert not any(x[3].any() for x in grads[0][2:])


@pytest.mark.parametrize(("gpu", "told"), [("NVIDIA H200", False), ("NVIDIA B300", True)])
def test_the_table_says_when_a_gpu_is_not_measured(monkeypatch, gpu, told):
    pytest.importorskip("triton")
    monkeypatch.setattr(experts, "triton_runs", lambda device: (True, f"Triton on {gpu}"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    facts = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    (_, usable, reason), _ = experts.BACKENDS.explain(**facts, num_experts=8, widths=(64, 64))
    assert usable
    assert ("costs.json has no such GPU" in reason) == told


@pytest.mark.parametrize("top_k", [1, 4])
def test_no_tokens_all_experts_and_integers_of_any_width(top_k):
    torch.manual_seed(2)
    w1, w3, w2 = torch.randn(4, 12, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 12)
    x, weights = torch.randn(6, 8), torch.rand(6, top_k)
    ids = torch.arange(top_k).expand(6, -1)
    ours = expert_mlp(x, ids, weights, w1, w3, w2)
    torch.testing.assert_close(ours, looped(x, ids, weights, w1, w3, w2))
    assert torch.equal(expert_mlp(x, ids.int(), weights, w1, w3, w2), ours)
    w1.requires_grad_()
    nothing = expert_mlp(x[:0], ids[:0], weights[:0], w1, w3, w2)
    assert nothing.shape == (0, 8)
    assert not torch.autograd.grad(nothing.sum(), w1)[0].any()


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
    for named, bad in (
        (r"x must be \[3, 8\]", (x[:, :4], ids, weights, w1, w1, w2)),
        (r"x must be \[3, 8\]", (x[:2], ids, weights, w1, w1, w2)),
        (r"weights must be \[3, 2\]", (x, ids, weights[:, :1], w1, w1, w2)),
        (r"w3 must be \[4, 6, 8\]", (x, ids, weights, w1, w1[:3], w2)),
        (r"w2 must be \[4, 8, 6\]", (x, ids, weights, w1, w1, w1)),
        (r"ids must lie in \[0, 4\); one is 4", (x, ids + 4, weights, w1, w1, w2)),
        (r"ids must lie in \[0, 4\); one is -1", (x, ids - 1, weights, w1, w1, w2)),
        ("ids must be of integers", (x, ids.bool(), weights, w1, w1, w2)),
        ("one dtype", (x, ids, weights, w1, w1, w2.double())),
    ):
        with pytest.raises(InputError, match=named):
            expert_mlp(*bad)
    with pytest.raises(InputError, match="alike"):
        situ_glu(x, x[:2])
    with pytest.raises(InputError, match="alike"):
        situ_glu(x, x.double())
    with pytest.raises(InputError, match="must be positive"):
        situ_glu(x, x, 4.0, 0.0)
    with pytest.raises(InputError, match=r"\[E, d\]"):
        route(x, torch.zeros(4, 7), torch.zeros(4), 2)
    with pytest.raises(InputError, match="between 1 and"):
        route(x, torch.zeros(4, 8), torch.zeros(4), 4)
    with pytest.raises(InputError, match=r"weight must be \[8\]"):
        rms_norm(x, torch.zeros(7), 1e-5)
