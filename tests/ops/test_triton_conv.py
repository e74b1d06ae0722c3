"""The convolution kernels in Triton's interpreter: output, state and gradients against float64."""

import pytest
import torch

from kernel_checks import relative_error
from openk3.ops.conv import short_conv_reference

triton_conv = pytest.importorskip("openk3.ops.triton_conv", exc_type=ImportError)


def run(function, inputs, offsets, with_state):
    x, weight, initial = (t.detach().requires_grad_() for t in inputs)
    y, final = function(
        x,
        weight,
        initial_state=initial if with_state else None,
        cu_seqlens=offsets,
        output_final_state=True,
    )
    rng = torch.Generator().manual_seed(3)
    d_y = torch.randn(y.shape, generator=rng).to(y.dtype)
    d_final = torch.randn(final.shape, generator=rng).to(final.dtype)
    leaves = [x, weight, *([initial] if with_state else [])]
    return [y, final, *torch.autograd.grad([y, final], leaves, [d_y, d_final])]


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(
    ("batch", "tokens", "dim", "offsets"),
    [
        (2, 70, 5, None),
        (1, 1, 64, None),
        (3, 3, 8, None),
        (1, 400, 70, [0, 1, 1, 4, 68, 72, 400]),
    ],
)
def test_output_state_and_gradients(batch, tokens, dim, offsets, with_state):
    rng = torch.Generator().manual_seed(tokens)
    num = batch if offsets is None else len(offsets) - 1
    shapes = [(batch, tokens, dim), (dim, 1, 4), (num, 4, dim)]
    inputs = [torch.randn(*shape, generator=rng) for shape in shapes]
    cu = None if offsets is None else torch.tensor(offsets)
    got = run(triton_conv.short_conv_triton, inputs, cu, with_state)
    wanted = run(short_conv_reference, [t.double() for t in inputs], cu, with_state)
    assert [relative_error(a, b) < 1e-6 for a, b in zip(got, wanted, strict=True)] == [True] * len(
        got
    )


def test_no_tokens_pass_the_state_on():
    initial = torch.randn(2, 4, 8)
    y, final = triton_conv.short_conv_triton(
        torch.zeros(2, 0, 8),
        torch.randn(8, 1, 4),
        initial_state=initial,
        cu_seqlens=None,
        output_final_state=True,
    )
    assert y.shape == (2, 0, 8)
    assert torch.equal(final, initial)


def test_custom_ops_are_registered_properly():
    x, weight = torch.randn(1, 9, 8), torch.randn(4, 8)
    args = (x.requires_grad_(), weight.requires_grad_(), None, None)
    torch.library.opcheck(triton_conv.conv_forward, args)
