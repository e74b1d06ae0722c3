"""The elementwise SiTU kernels in the interpreter, at magnitudes from 1e-4 to 200."""

import pytest
import torch

from kernel_checks import gradients, relative_error
from openk3.errors import BackendError
from openk3.ops.moe.situ import situ_glu, situ_reference

kernels = pytest.importorskip("openk3.ops.moe.triton_situ", exc_type=ImportError)


@pytest.mark.parametrize("beta2", [25.0, None])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 50.0, 200.0])
def test_value_and_gradients(magnitude, beta2):
    rng = torch.Generator().manual_seed(0)
    gate, up, d_out = (torch.randn(2, 3, 192, generator=rng) * m for m in (magnitude, magnitude, 1))
    got = gradients(lambda *a: kernels.situ_triton(*a, 4.0, beta2), (gate, up), d_out)
    wanted = gradients(
        lambda *a: situ_reference(*a, 4.0, beta2), (gate.double(), up.double()), d_out.double()
    )
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == gate.shape
        assert relative_error(a, b) < 2e-6


def test_saturation_is_finite_and_exact():
    gate = torch.tensor([1e4, -1e4, 0.0, 30.0]).repeat(16)[None]
    up = torch.tensor([1e4, 1e4, 5.0, -1e4]).repeat(16)[None]
    got = kernels.situ_triton(gate, up, 4.0, 25.0)
    torch.testing.assert_close(got, situ_reference(gate, up, 4.0, 25.0), atol=1e-4, rtol=1e-6)


def test_an_impossible_backend_is_refused():
    with pytest.raises(BackendError, match="CUDA device"):
        situ_glu(torch.ones(1, 64), torch.ones(1, 64), backend="triton")
