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
def _pair_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """For each byte its two values in `dtype`, held as one integer so that a lookup moves both."""
    codes = unpack(torch.arange(256, dtype=torch.uint8).view(256, 1))
    pairs = torch.tensor(VALUES, dtype=dtype)[codes.long()]
    as_int = torch.int64 if dtype == torch.float32 else torch.int32
    return pairs.view(as_int).view(256).to(device)


def decode_into(packed: Tensor, out: Tensor) -> None:
    """Element values of flat bytes [n / 2] into flat `out` [n] (float32 or bfloat16)."""
    table = _pair_table(out.dtype, out.device)
    torch.index_select(table, 0, packed.to(torch.int32), out=out.view(table.dtype))
