"""Bit equality with the reference quantiser, and interoperability with compressed-tensors."""

import pytest
import torch
from safetensors.torch import load_file

from conftest import GOLDEN_SHARED
from openk3.ops import mx

FOLDER = GOLDEN_SHARED / "golden_mx"
pytestmark = [
    pytest.mark.skipif(not FOLDER.exists(), reason=f"{FOLDER} is not on this machine"),
]
FILES = [(name, dtype) for name in ("mxfp4", "mxfp8") for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module", params=FILES, ids=lambda pair: "-".join(pair))
def golden(request):
    name, dtype = request.param
    return name, load_file(FOLDER / f"{name}_{dtype}.safetensors")


def cases(tensors):
    return sorted({key.split("/")[0] for key in tensors})


def same_values(a, b):
    return torch.equal(a.nan_to_num(7.25), b.nan_to_num(7.25)) and torch.equal(a.isnan(), b.isnan())


def element_bits(data):
    return mx.unpack(data) if data.dtype == torch.uint8 else data.view(torch.uint8)


@pytest.mark.parametrize("mode", mx.MODES)
def test_every_case_equals_the_reference(golden, mode):
    name, tensors = golden
    key = "packed" if name == "mxfp4" else "qdata"
    assert len(cases(tensors)) == 19
    for case in cases(tensors):
        x = tensors[f"{case}/input"]
        ref = {what: tensors[f"{case}/ref.{mode}/{what}"] for what in (key, "scales", "dequant")}
        ours = mx.quantize(x, name, mode=mode)
        assert torch.equal(ours.scale, ref["scales"]), case
        # ours saturates where the reference reaches 2^128, and writes -0.0 as +0
        finite_blocks = x.float().unflatten(-1, (-1, 32)).isfinite().all(-1, keepdim=True)
        finite_blocks = finite_blocks.expand(*finite_blocks.shape[:-1], 32).flatten(-2)
        overflow = finite_blocks & ~ref["dequant"].isfinite()
        ordinary = ~overflow & (x != 0) & ~ref["dequant"].isnan()
        expected_bits, bits = element_bits(ref[key]), element_bits(ours.data)
        assert torch.equal(bits[ordinary], expected_bits[ordinary]), case
        assert not bits[x == 0][ref["dequant"][x == 0] == 0].any(), case
        back = mx.dequantize(*ours, name)
        assert same_values(back[~overflow], ref["dequant"][~overflow]), case
        assert back[overflow].isfinite().all()
        assert torch.equal(back[overflow].sign(), x[overflow].float().sign())
        if case in ("huge", "float_max") and mode == "floor":
            assert not overflow.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_even_writes_what_compressed_tensors_writes(dtype):
    tensors = load_file(FOLDER / f"mxfp4_{dtype}.safetensors")
    for case in cases(tensors):
        x = tensors[f"{case}/input"].float()
        amax = x.abs().unflatten(-1, (-1, 32)).amax(-1)
        blocks = amax < 1.75 * 2**127  # also drops infinite and NaN blocks
        ours = mx.quantize(tensors[f"{case}/input"], "mxfp4")
        assert torch.equal(ours.scale[blocks], tensors[f"{case}/ct.even/scales"][blocks]), case
        packed = tensors[f"{case}/ct.even/packed"].unflatten(-1, (-1, 16))
        ours_packed = ours.data.unflatten(-1, (-1, 16))
        assert torch.equal(ours_packed[blocks], packed[blocks]), case


@pytest.mark.parametrize("mode", ["even", "rceil", "floor"])
def test_qat_linear_forward_and_gradients(mode):
    tensors = load_file(FOLDER / "qat_linear.safetensors")
    x = tensors["x"].clone().requires_grad_()
    w = tensors["w"].clone().requires_grad_()
    x_fq = mx.fake_quantize(x, "mxfp8", mode=mode)
    w_fq = mx.fake_quantize(w, "mxfp4", mode=mode)
    assert torch.equal(x_fq, tensors[f"{mode}/x_fq"])
    assert torch.equal(w_fq, tensors[f"{mode}/w_fq"])
    y = x_fq.double() @ w_fq.double().T
    y.backward(tensors["grad_y"].double())
    torch.testing.assert_close(y.float(), tensors[f"{mode}/y"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad, tensors[f"{mode}/grad_x"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(w.grad, tensors[f"{mode}/grad_w"], rtol=1e-6, atol=1e-6)


def test_golden_mxfp4_file():
    tensors = load_file(GOLDEN_SHARED / "golden" / "mxfp4.safetensors")
    ours = mx.quantize(tensors["input/weight_bf16"])
    assert torch.equal(ours.data, tensors["output/weight_packed"])
    assert torch.equal(ours.scale, tensors["output/weight_scale"])
    assert torch.equal(mx.dequantize(*ours), tensors["output/dequant"])
    every_code = mx.dequantize(tensors["input/allcodes_packed"], tensors["input/allcodes_scale"])
    assert torch.equal(every_code, tensors["output/allcodes_dequant"])
    assert torch.equal(every_code.signbit(), tensors["output/allcodes_dequant"].signbit())
