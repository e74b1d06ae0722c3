"""The RMSNorm kernel in Triton's interpreter against float64."""

import pytest
import torch

from kernel_checks import gradients, relative_error
from openk3.errors import BackendError
from openk3.ops.norm import rms_norm
from openk3.ops.norm.reference import rms_norm_reference

triton_norm = pytest.importorskip("openk3.ops.norm.triton_norm", exc_type=ImportError)


@pytest.mark.parametrize(("lead", "dim"), [((1,), 64), ((2, 3), 192), ((0,), 64)])
def test_output_and_gradients(lead, dim):
    rng = torch.Generator().manual_seed(0)
    x = 7 * torch.randn(*lead, dim, generator=rng)
    weight, d_out = torch.randn(dim, generator=rng), torch.randn(*lead, dim, generator=rng)
    got = gradients(lambda *a: triton_norm.rms_norm_triton(*a, 1e-5), (x, weight), d_out)
    wanted = gradients(
        lambda *a: rms_norm_reference(*a, 1e-5), (x.double(), weight.double()), d_out.double()
    )
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b) < 2e-6


def test_the_model_s_order_of_casts():
    """Normalise, round, multiply: bit for bit the reference."""
    rng = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(5, 192, generator=rng).bfloat16() for _ in range(2))
    weight = weight[0]
    got = triton_norm.rms_norm_triton(x, weight, 1e-5)
    assert torch.equal(got, rms_norm_reference(x, weight, 1e-5))


def test_an_impossible_backend_is_refused():
    with pytest.raises(BackendError, match="CUDA device"):
        rms_norm(torch.ones(1, 64), torch.ones(64), 1e-5, backend="triton")
