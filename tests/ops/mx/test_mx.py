"""Properties of the quantiser against a slow float64 search, without golden files."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.errors import InputError
from openk3.ops import mx
from openk3.ops.mx.e2m1 import MAGNITUDES

E4M3 = sorted({abs(v) for v in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
               .float().tolist() if v == v})  # fmt: skip
GRIDS = {"mxfp4": list(MAGNITUDES), "mxfp8": E4M3}


def nearest_even(value: float, grid: list[float]) -> float:
    """Nearest grid value; ties to the even index; saturates."""
    best = min(range(len(grid)), key=lambda i: (abs(grid[i] - value), i % 2))
    return grid[best]


def slow_block(values: list[float], name: str, mode: str) -> tuple[int, list[float]]:
    """Scale code and dequantised values, by float64 search (infinity where 2^128 is reached)."""
    emax, largest = {"mxfp4": (2, 6.0), "mxfp8": (8, 448.0)}[name]
    amax = max(map(abs, values))
    if amax == 0:
        return 0, [0.0] * len(values)
    exponent = math.frexp(amax)[1] - 1
    frac = amax / 2.0**exponent
    bump = {
        "floor": False,
        "ceil": frac > 1,
        "rceil": frac > largest / 2**emax,
        "even": frac >= 2 - 2.0 ** -(2 if name == "mxfp4" else 4),
    }[mode]
    code = min(254, max(0, exponent - emax + bump + 127))
    scale = 2.0 ** (code - 127)
    return code, [
        math.copysign(nearest_even(abs(v) / scale, GRIDS[name]) * scale, v) for v in values
    ]


finite_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=150, deadline=None)
@given(st.lists(finite_float32, min_size=32, max_size=32), st.sampled_from(sorted(GRIDS)),
       st.sampled_from(mx.MODES))  # fmt: skip
def test_any_finite_block_equals_a_float64_search(values, name, mode):
    code, expected = slow_block(values, name, mode)
    data, scale = mx.quantize(torch.tensor(values), name, mode=mode)
    back = mx.dequantize(data, scale, name)
    assert scale.tolist() == [code]
    assert back.isfinite().all()
    limit = float(torch.finfo(torch.float32).max)
    for ours, want in zip(back.tolist(), expected, strict=True):
        assert ours == want or (abs(want) > limit and math.copysign(1, ours * want) == 1)


@pytest.mark.parametrize("name", sorted(GRIDS))
@pytest.mark.parametrize("mode", mx.MODES)
def test_quantising_twice_changes_nothing(name, mode):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    once = mx.fake_quantize(x, name, mode=mode)
    assert torch.equal(mx.fake_quantize(once, name, mode=mode), once)


def test_pack_and_unpack_are_inverse_and_the_even_column_is_low():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).view(1, 32)
    packed = mx.pack(codes)
    assert packed[0, 0].item() == 0 | 1 << 4
    assert torch.equal(mx.unpack(packed), codes)
    every_byte = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(mx.pack(mx.unpack(every_byte)), every_byte)


def test_scale_code_0_and_254_are_exact_and_255_is_nan():
    one = mx.pack(torch.full((3, 32), 2, dtype=torch.uint8))  # 1.0
    scale = torch.tensor([[0], [254], [255]], dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        values = mx.dequantize(one, scale, dtype=dtype).double()
        assert (values[0] == 2.0**-127).all()
        assert (values[1] == 2.0**127).all()
        assert values[2].isnan().all()


def test_negative_zero_is_written_as_zero_but_small_negatives_keep_their_sign():
    x = torch.zeros(32)
    x[0], x[1], x[2] = 6.0, -0.0, -0.1
    assert mx.unpack(mx.quantize(x).data)[:3].tolist() == [7, 0, 8]
    assert mx.quantize(x, "mxfp8").data.view(torch.uint8)[1] == 0


def test_bfloat16_values_are_the_float32_values():
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scale = torch.arange(16, dtype=torch.uint8).view(16, 1) * 16
    wide = mx.dequantize(packed, scale)
    assert torch.equal(mx.dequantize(packed, scale, dtype=torch.bfloat16).float(), wide)
    half = mx.dequantize(packed, torch.full_like(scale, 120), dtype=torch.float16)
    assert torch.equal(half.float(), mx.dequantize(packed, torch.full_like(scale, 120)))


def test_dequantize_into_a_given_tensor():
    x = torch.randn(4, 64)
    out = torch.full((4, 64), torch.nan)
    mx.dequantize(*mx.quantize(x), out=out)
    assert torch.equal(out, mx.fake_quantize(x))


def test_export_refuses_and_names_the_tensor():
    for bad in (torch.nan, torch.inf, 1.75 * 2.0**127):
        weight = torch.zeros(2, 64)
        weight[1, 40] = bad
        with pytest.raises(InputError, match=r"layers\.3\.w1"):
            mx.quantize_weight(weight, "layers.3.w1")
    weight[1, 40] = 1.7499 * 2.0**127
    data, scale = mx.quantize_weight(weight, "layers.3.w1")
    mx.check_finite_blocks(data, scale, "w")
    with pytest.raises(InputError, match="layers"):
        mx.check_finite_blocks(data, torch.full_like(scale, 255), "layers.3.w1")
    with pytest.raises(InputError, match="infinity"):
        mx.check_finite_blocks(data, torch.full_like(scale, 254), "layers.3.w1")
    mx.check_finite_blocks(torch.zeros_like(data), torch.full_like(scale, 254), "zeros are fine")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mx.quantize(torch.zeros(2, 33)), "multiple of 32"),
        (lambda: mx.quantize(torch.zeros(32), "mxfp6"), "mxfp6"),
        (lambda: mx.quantize(torch.zeros(32), mode="up"), "'up'"),
        (lambda: mx.quantize(torch.zeros(32, dtype=torch.float64)), "float64"),
        (lambda: mx.dequantize(torch.zeros(2, 16, dtype=torch.uint8),
                               torch.zeros(2, 2, dtype=torch.uint8)), r"\[2, 1\]"),
        (lambda: mx.dequantize(torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.uint8)), "uint8"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_the_reason(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_leading_dimensions_and_empty_tensors():
    x = torch.randn(3, 0, 64)
    assert mx.quantize(x).data.shape == (3, 0, 32)
    x = torch.randn(2, 3, 5, 64)
    whole = mx.quantize(x)
    assert whole.data.shape == (2, 3, 5, 32)
    assert whole.scale.shape == (2, 3, 5, 2)
    assert torch.equal(whole.data[1, 2], mx.quantize(x[1, 2]).data)
