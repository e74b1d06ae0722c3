"""E2M1 elements and their packing, two to a byte.

Code = sign << 3 | index into {0, .5, 1, 1.5, 2, 3, 4, 6}. A byte holds the even column in its low
nibble and the odd column in its high nibble (what compressed-tensors calls mxfp4-pack-quantized).
"""

from functools import cache

import torch
from torch import Tensor

from openk3.errors import InputError

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = MAGNITUDES + tuple(-value for value in MAGNITUDES)


def encode(magnitude: Tensor) -> Tensor:
    """Indices 0..7 (uint8) of the nearest magnitudes; ties go to the even index.

    Counts the thresholds below: `>` where the lower neighbour is even, `>=` where it is odd.
    """
    index = (magnitude > 0.25).view(torch.uint8)
    for threshold, tie_goes_up in (
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        index += magnitude >= threshold if tie_goes_up else magnitude > threshold
    return index


def pack(codes: Tensor) -> Tensor:
    """Codes 0..15 (uint8 [..., n], n even) to bytes (uint8 [..., n / 2])."""
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2:
        raise InputError(
            f"codes are {codes.dtype} {list(codes.shape)}; expected uint8 with an even last dim"
        )
    pairs = codes.contiguous().view(torch.int16)  # low byte: even column (little endian)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Bytes (uint8 [..., n / 2]) to codes 0..15 (uint8 [..., n])."""
    if packed.dtype != torch.uint8:
        raise InputError(f"packed data is {packed.dtype}; expected uint8")
    pairs = packed.to(torch.int16)
    return ((pairs & 15) | (pairs >> 4 << 8)).view(torch.uint8)


@cache
@torch.inference_mode(False)  # cached for every later mode
def _product_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Entry [scale << 8 | byte]: the byte's two values times the scale, rounded to `dtype` once.

    Held as one integer each, so that a lookup moves both; a table needs no arithmetic on values, so
    flushing of subnormals cannot touch it.
    """
    codes = unpack(torch.arange(256, dtype=torch.uint8).view(256, 1)).long()
    scales = torch.exp2(torch.arange(256, dtype=torch.float64) - 127)
    scales[255] = torch.nan
    pairs = torch.tensor(VALUES, dtype=torch.float64)[codes] * scales[:, None, None]
    as_int = torch.int64 if dtype == torch.float32 else torch.int32
    return pairs.to(dtype).view(as_int).view(-1).to(device)


def decode_into(packed_NB: Tensor, scale_N: Tensor, out_NB: Tensor) -> None:
    """Values of blocks of bytes [N, 16] with scales [N] into `out` [N, 32] (contiguous)."""
    table = _product_table(out_NB.dtype, out_NB.device)
    index_NB = packed_NB.to(torch.int32)
    index_NB += (scale_N.to(torch.int32) << 8)[:, None]
    torch.index_select(table, 0, index_NB.view(-1), out=out_NB.view(-1).view(table.dtype))
