"""Quantise, dequantise and fake-quantise tensors in MX formats.

The encoder only ever multiplies by an exact power of two, so its arithmetic cannot overflow and
rounds once. Blocks are independent: on a CPU they are worked off in pieces that stay in cache.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from openk3.errors import InputError
from openk3.ops.mx import e2m1
from openk3.ops.mx.formats import (
    BLOCK,
    NAN_CODE,
    Format,
    find_format,
    inverse_scale_values,
    scale_codes,
    scale_values,
)

_CPU_BLOCKS = 1 << 16  # 2 Mi elements: in a shared cache, and few enough barriers for busy machines
_TOP_CODE = find_format("mxfp4").top_code


class Quantized(NamedTuple):
    """Elements and scales of one tensor [..., n]."""

    data: Tensor
    """mxfp4: uint8 [..., n / 2], two codes a byte. mxfp8: float8_e4m3fn [..., n]."""
    scale: Tensor
    """uint8 [..., n / 32], E8M0."""


def quantize(x: Tensor, format: str = "mxfp4", *, mode: str | None = None) -> Quantized:
    """Quantise `x` (float32, bfloat16 or float16 [..., n], n a multiple of 32) along its last dim.

    `mode` chooses the scale: even, rceil, floor, ceil; by default even for mxfp4 (weights) and
    rceil for mxfp8 (activations). Elements round to nearest, ties to even, and saturate. -0.0
    becomes +0. A finite block always dequantises to finite float32: where 2^128 would be reached
    the element saturates lower. A NaN makes its block NaN (code 255); an infinity stays one.
    K3 report §4, QAT. Raises InputError.
    """
    fmt = find_format(format)
    mode = mode or fmt.default_mode
    _check_blocks(x)
    x_NB = x.detach().contiguous().view(-1, BLOCK)
    scale = torch.empty(x_NB.shape[0], dtype=torch.uint8, device=x.device)
    if fmt.name == "mxfp4":
        data = torch.empty(x_NB.shape[0], BLOCK // 2, dtype=torch.uint8, device=x.device)
    else:
        data = torch.empty(x_NB.shape, dtype=torch.float8_e4m3fn, device=x.device)
    for part in _pieces(x_NB):
        data[part], scale[part] = _quantize_blocks(x_NB[part].float(), fmt, mode)
    lead, n = x.shape[:-1], x.shape[-1]
    return Quantized(
        data.view(*lead, n // 2 if fmt.name == "mxfp4" else n), scale.view(*lead, n // BLOCK)
    )


def _quantize_blocks(x_NB: Tensor, fmt: Format, mode: str) -> tuple[Tensor, Tensor]:
    low_N, high_N = torch.aminmax(x_NB, dim=-1)
    amax_N = torch.maximum(high_N, -low_N)
    code_N = scale_codes(amax_N, fmt, mode)
    near_overflow_N = (code_N == fmt.top_code) & amax_N.isfinite()
    limit_N = torch.where(near_overflow_N, fmt.top_element, fmt.largest)
    magnitude_NB = x_NB.abs().mul_(inverse_scale_values(code_N)[:, None])
    # not `minimum`: a NaN must lose here, its block is marked by the scale
    magnitude_NB = torch.fmin(magnitude_NB, limit_N[:, None])
    negative_NB = x_NB < 0
    if fmt.name == "mxfp8":
        signed_NB = torch.where(negative_NB, -magnitude_NB, magnitude_NB)
        signed_NB = signed_NB.masked_fill_((code_N == NAN_CODE)[:, None], torch.nan)
        return signed_NB.to(torch.float8_e4m3fn), code_N
    index_NB = e2m1.encode(magnitude_NB)
    index_NB |= negative_NB.view(torch.uint8) << 3
    index_NB.masked_fill_((code_N == NAN_CODE)[:, None], 0)
    return e2m1.pack(index_NB), code_N


def dequantize(
    data: Tensor,
    scale: Tensor,
    format: str = "mxfp4",
    *,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Values [..., n] of `quantize`'s two tensors, in `dtype` or into contiguous `out`.

    Exact in float32 (code 0 is 2^-127, 254 is 2^127, 255 is NaN) and, for mxfp4, in bfloat16
    wherever the product is finite. Raises InputError when the shapes do not belong together.
    """
    fmt = find_format(format)
    shape = _check_pair(data, scale, fmt)
    dtype = dtype if out is None else out.dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f"dtype is {dtype}; expected float32, bfloat16 or float16")
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=data.device)
    elif out.shape != torch.Size(shape) or not out.is_contiguous() or out.device != data.device:
        raise InputError(
            f"out is {list(out.shape)} on {out.device}; expected {shape}, contiguous, on "
            f"{data.device}"
        )
    out_NB = out.view(-1, BLOCK)
    data_NB = data.contiguous().view(-1, BLOCK // 2 if fmt.name == "mxfp4" else BLOCK)
    scale_N = scale.contiguous().view(-1)
    for part in _pieces(out_NB):
        _dequantize_blocks(data_NB[part], scale_N[part], out_NB[part], fmt)
    return out


def _dequantize_blocks(data_NB: Tensor, code_N: Tensor, out_NB: Tensor, fmt: Format) -> None:
    if fmt.name == "mxfp8":
        out_NB.copy_(data_NB.float().mul_(scale_values(code_N)[:, None]))
    else:
        e2m1.decode_into(data_NB, code_N, out_NB)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, format: str, mode: str | None) -> Tensor:
        return dequantize(*quantize(x, format, mode=mode), format, dtype=x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad, None, None


def fake_quantize(x: Tensor, format: str = "mxfp4", *, mode: str | None = None) -> Tensor:
    """`dequantize(*quantize(x))` in x's dtype; its gradient is the identity (straight-through).

    What a quantisation-aware forward multiplies with: bit for bit what export writes and serving
    reads. K3 report §4, QAT. Raises InputError.
    """
    return _FakeQuantize.apply(x, format, mode)  # type: ignore[no-any-return]


def quantize_weight(weight: Tensor, name: str) -> Quantized:
    """MXFP4 of a weight that goes into a file: scale rule even, and nothing is changed silently.

    Raises InputError that names the tensor when it is not finite, or when a block's maximum is so
    large that the format's own value is infinite (1.75 * 2^127 and up).
    """
    if not bool(weight.isfinite().all()):
        raise InputError(f"{name} holds NaN or infinite values; only finite weights are exported")
    result = quantize(weight, "mxfp4", mode="even")
    if bool((result.scale >= _TOP_CODE).any()):
        raise InputError(
            f"{name} has magnitudes of 1.75 * 2^127 and more, which MXFP4 would make infinite"
        )
    return result


def check_finite_blocks(packed: Tensor, scale: Tensor, name: str) -> None:
    """Raise InputError that names the tensor if packed MXFP4 blocks hold NaN or infinite values.

    `packed` uint8 [..., n / 2], `scale` uint8 [..., n / 32]. Code 255 is NaN; 253 with an element
    of 4 or 6, and 254 with 2 or more, pass 2^128. Only blocks of such codes are decoded.
    """
    _check_pair(packed, scale, find_format("mxfp4"))
    suspicious = scale.reshape(-1) >= _TOP_CODE
    if not bool(suspicious.any()):
        return
    blocks = packed.reshape(-1, BLOCK // 2)[suspicious]
    values = dequantize(blocks, scale.reshape(-1)[suspicious][:, None])
    if not bool(values.isfinite().all()):
        bad = int((~values.isfinite()).any(-1).sum())
        raise InputError(f"{name}: {bad} MXFP4 blocks dequantise to NaN or infinity")


def _pieces(x_NB: Tensor) -> Iterator[slice]:
    """Slices over blocks: cache-sized on a CPU, everything at once elsewhere."""
    count = x_NB.shape[0]
    step = _CPU_BLOCKS if x_NB.device.type == "cpu" else max(count, 1)
    return (slice(start, start + step) for start in range(0, count, step))


def _check_blocks(x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f"x is {x.dtype}; expected float32, bfloat16 or float16")
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise InputError(f"x is {list(x.shape)}; its last dimension must be a multiple of {BLOCK}")


def _check_pair(data: Tensor, scale: Tensor, fmt: Format) -> list[int]:
    """The shape of the dequantised tensor."""
    per_item, dtype = (2, torch.uint8) if fmt.name == "mxfp4" else (1, torch.float8_e4m3fn)
    if data.dtype != dtype or scale.dtype != torch.uint8:
        raise InputError(
            f"{fmt.name} data is {data.dtype}, scale {scale.dtype}; expected {dtype} and uint8"
        )
    shape = [*data.shape[:-1], data.shape[-1] * per_item]
    expected = [*data.shape[:-1], shape[-1] // BLOCK]
    if shape[-1] % BLOCK or list(scale.shape) != expected:
        raise InputError(
            f"{fmt.name} data {list(data.shape)} needs scales {expected}, got {list(scale.shape)}"
        )
    return shape
