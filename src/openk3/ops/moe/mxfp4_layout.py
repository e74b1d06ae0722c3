"""The order in which 4-bit expert weights lie in memory for the decode kernels.

Published order is [E, N, K / 2] bytes. Ours is [E, N / 16, K / 128, 512] int16: the 2048 weights of
16 rows and 128 columns are contiguous, and lane 4 g + t of a warp finds the eight codes of each
tensor-core register next to each other. Done once, when weights are loaded.

A word holds the codes of one row and of four columns 32 apart (one from each scale block), with
their bits spread so that a mask, or a shift and a mask, turns each into a float16:

    bit      15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    column    0  2  3  1  0  0  0  1  1  1  2  2  2  3  3  3
              sign bits . magnitudes, high bit first . . . .
"""

from typing import NamedTuple

import torch
from torch import Tensor

from openk3.errors import InputError
from openk3.ops.checks import check_tensor
from openk3.ops.mx import pack, unpack

TILE_ROWS, TILE_COLUMNS = 16, 128
_SIGN_BIT = (15, 12, 14, 13)
_LOW_BIT = (9, 6, 3, 0)


class PackedMatrix(NamedTuple):
    """One projection of E experts, W [E, N, K]."""

    words: Tensor
    """int16 [E, N / 16, K / 128, 512]."""
    scales: Tensor
    """int32 [E, N, K / 128]: the E8M0 bytes of four neighbouring blocks, lowest first."""


class PackedExperts(NamedTuple):
    """The three projections of all experts of a layer."""

    w1: PackedMatrix
    w3: PackedMatrix
    w2: PackedMatrix


def pack_matrix(packed: Tensor, scale: Tensor) -> PackedMatrix:
    """Published bytes (uint8 [E, N, K / 2] and [E, N, K / 32]) -> kernel order, on their device.

    N must be a multiple of 32 and K of 128. Raises InputError.
    """
    if packed.ndim != 3 or packed.shape[1] % 32 or packed.shape[2] % (TILE_COLUMNS // 2):
        raise InputError(
            f"packed must be [E, N, K / 2] with N a multiple of 32 and K of {TILE_COLUMNS}, not "
            f"{list(packed.shape)}"
        )
    num_experts, rows, half = packed.shape
    check_tensor("scale", scale, (num_experts, rows, half // 16), packed.device, kind="integer")
    if scale.dtype != torch.uint8:
        raise InputError(f"scale must be uint8, not {scale.dtype}")
    words = torch.stack([_words(p) for p in packed])
    return PackedMatrix(words, scale.contiguous().view(torch.int32))


def _words(packed: Tensor) -> Tensor:
    codes = unpack(packed).to(torch.int32)
    rows, columns = codes.shape
    tiles, blocks = rows // TILE_ROWS, columns // TILE_COLUMNS
    # row = 16 tile + 8 r0 + g; column = 128 kb + 32 j + 8 t + 4 kt + 2 r1 + h
    codes = codes.view(tiles, 2, 8, blocks, 4, 4, 2, 2, 2)
    codes = codes.permute(0, 3, 6, 2, 5, 7, 1, 8, 4)  # tile, kb, kt, g, t, r1, r0, h, j
    shift = torch.tensor(_LOW_BIT, dtype=torch.int32, device=codes.device)
    sign = torch.tensor(_SIGN_BIT, dtype=torch.int32, device=codes.device)
    bits = ((codes & 7) << shift) | ((codes >> 3) << sign)
    return bits.sum(-1).to(torch.int16).reshape(tiles, blocks, 512)


def published_bytes(words: Tensor) -> Tensor:
    """The inverse of the permutation: words int16 [N / 16, K / 128, 512] -> uint8 [N, K / 2]."""
    tiles, blocks, _ = words.shape
    bits = words.to(torch.int32)[..., None]
    shift = torch.tensor(_LOW_BIT, dtype=torch.int32, device=words.device)
    sign = torch.tensor(_SIGN_BIT, dtype=torch.int32, device=words.device)
    codes = ((bits >> shift) & 7) | (((bits >> sign) & 1) << 3)
    codes = codes.view(tiles, blocks, 2, 8, 4, 2, 2, 2, 4)  # tile, kb, kt, g, t, r1, r0, h, j
    codes = codes.permute(0, 6, 3, 1, 8, 4, 2, 5, 7)
    return pack(codes.reshape(TILE_ROWS * tiles, TILE_COLUMNS * blocks).to(torch.uint8))


def arrange_in_place(packed: Tensor, *, back: bool = False) -> None:
    """Permute published bytes uint8 [E, N, K / 2] into kernel order within their own memory, one
    expert at a time, or `back`. Widths as of `pack_matrix`."""
    for bytes_of_one in packed:
        words = bytes_of_one.view(torch.int16).view(-1, packed.shape[2] // 64, 512)
        if back:
            bytes_of_one.copy_(published_bytes(words))
        else:
            words.copy_(_words(bytes_of_one))


def as_matrix(arranged: Tensor, scale: Tensor) -> PackedMatrix:
    """Arranged bytes uint8 [E, N, K / 2] and their scales uint8 [E, N, K / 32], without a copy."""
    num_experts, rows, half = arranged.shape
    words = arranged.view(torch.int16).view(num_experts, rows // TILE_ROWS, half // 64, 512)
    return PackedMatrix(words, scale.view(torch.int32))


def pack_experts(
    w1: tuple[Tensor, Tensor], w3: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]
) -> PackedExperts:
    """(weight_packed, weight_scale) of gate, up [E, F, L] and down [E, L, F]."""
    return PackedExperts(pack_matrix(*w1), pack_matrix(*w3), pack_matrix(*w2))
