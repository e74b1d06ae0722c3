"""Microscaling number formats: MXFP4 for the routed expert weights, MXFP8 for their inputs.

A block is 32 neighbours along the last dimension that share one power-of-two scale (E8M0 byte).
`quantize`, `dequantize` and `fake_quantize` are the same arithmetic everywhere: export, QAT and
serving give the same bits.
"""

from openk3.ops.mx.e2m1 import pack, unpack
from openk3.ops.mx.formats import BLOCK, FORMATS, MODES, scale_values
from openk3.ops.mx.quant import (
    Quantized,
    check_finite_blocks,
    dequantize,
    fake_quantize,
    quantize,
    quantize_weight,
)

__all__ = [
    "BLOCK",
    "FORMATS",
    "MODES",
    "Quantized",
    "check_finite_blocks",
    "dequantize",
    "fake_quantize",
    "pack",
    "quantize",
    "quantize_weight",
    "scale_values",
    "unpack",
]
