"""The two element formats and the four rules that choose a block's E8M0 scale (OCP MX v1.0).

An E8M0 byte c stands for 2^(c - 127); 255 is NaN; there is no zero and no infinity. Write
amax = frac * 2^E with 1 <= frac < 2. Every rule gives c = 127 + E - emax (+ 1 if bumped):

    floor   never bumps: frac above the largest element saturates
    ceil    bumps when frac > 1
    rceil   bumps when amax would exceed the largest element, so nothing saturates
    even    bumps when frac, rounded to the element's own mantissa, reaches 2
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.errors import InputError

BLOCK = 32
NAN_CODE = 255
MODES = ("even", "rceil", "floor", "ceil")


@dataclass(frozen=True)
class Format:
    """One MX element format."""

    name: str
    emax: int
    """Exponent of the largest element."""
    largest: float
    """Largest element magnitude: 6 for E2M1, 448 for E4M3."""
    even_bump: float
    """Smallest `frac` that rounds up to 2 in the element's mantissa."""
    top_code: int
    """The scale code at which elements of a finite float32 block can pass 2^128."""
    top_element: float
    """Largest element whose product with 2^(top_code - 127) is still finite."""
    default_mode: str
    """`even` has the lowest error on weights, `rceil` on activations."""


FORMATS = {
    "mxfp4": Format("mxfp4", 2, 6.0, 1.75, top_code=253, top_element=3.0, default_mode="even"),
    "mxfp8": Format(
        "mxfp8", 8, 448.0, 1.9375, top_code=247, top_element=240.0, default_mode="rceil"
    ),
}


def find_format(name: str) -> Format:
    """The format called `name`. Raises InputError for another name."""
    if name not in FORMATS:
        raise InputError(f"format is {name!r}; allowed: {', '.join(FORMATS)}")
    return FORMATS[name]


def scale_codes(amax: Tensor, fmt: Format, mode: str) -> Tensor:
    """E8M0 codes (uint8) of blocks whose largest magnitudes are `amax` (any float dtype).

    A NaN gives 255. Zero and everything that would need a code below 0 give 0. The exponent comes
    from `frexp` on float64, which is exact for subnormals and one ulp beside a power of two.
    """
    mantissa, exponent = torch.frexp(amax.double())
    frac = 2 * mantissa
    bump = {
        "floor": lambda: torch.zeros_like(frac, dtype=torch.bool),
        "ceil": lambda: frac > 1,
        "rceil": lambda: frac > fmt.largest / 2**fmt.emax,
        "even": lambda: frac >= fmt.even_bump,
    }
    if mode not in bump:
        raise InputError(f"mode is {mode!r}; allowed: {', '.join(MODES)}")
    codes = exponent - 1 - fmt.emax + 127 + bump[mode]()
    codes = codes.masked_fill(amax == 0, 0)
    infinite = 254 if mode == "rceil" else 128 - fmt.emax + 127
    codes = codes.masked_fill(amax == torch.inf, infinite).clamp(0, 254)
    return codes.masked_fill(amax.isnan(), NAN_CODE).to(torch.uint8)


def scale_values(codes: Tensor) -> Tensor:
    """2^(code - 127) as float32, NaN at 255. Built from bits: exact at code 0 (2^-127) and 254."""
    bits = codes.to(torch.int32) << 23
    bits = bits.masked_fill(codes == 0, 0x00400000).masked_fill(codes == NAN_CODE, 0x7FC00000)
    return bits.view(torch.float32)


def inverse_scale_values(codes: Tensor) -> Tensor:
    """2^(127 - code) as float32, zero at 255 (a NaN block keeps no elements)."""
    return scale_values((254 - codes.to(torch.int16)).clamp(min=0)).masked_fill(
        codes == NAN_CODE, 0
    )
