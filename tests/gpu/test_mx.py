"""The quantiser on a GPU gives the bits it gives on a CPU."""

import pytest
import torch

from openk3.ops import mx

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("mode", mx.MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_as_the_cpu(name, mode, dtype):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(64, 1024, generator=rng)
    x = (x * torch.exp2(torch.randint(-140, 120, (64, 1024), generator=rng).float())).to(dtype)
    x[0, :3] = torch.tensor([torch.nan, torch.inf, -0.0], dtype=dtype)
    here, there = mx.quantize(x, name, mode=mode), mx.quantize(x.cuda(), name, mode=mode)
    ours, theirs = (q.data.view(torch.uint8).cpu() for q in (here, there))
    known = here.scale.repeat_interleave(ours.shape[-1] // here.scale.shape[-1], -1) != 255
    assert torch.equal(ours[known], theirs[known])
    assert torch.equal(here.scale, there.scale.cpu())
    for out in (torch.float32, torch.bfloat16):
        a = mx.dequantize(*here, name, dtype=out)
        b = mx.dequantize(*there, name, dtype=out).cpu()
        assert torch.equal(a.nan_to_num(3.5), b.nan_to_num(3.5))
