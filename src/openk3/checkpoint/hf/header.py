"""Reads a safetensors header and believes nothing in it before it is checked. No tensor is touched.

A file is: 8 bytes little-endian header length, JSON {name: {dtype, shape, data_offsets}}, data.
"""

import os
import reprlib
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from openk3._io import parse_json
from openk3.errors import CheckpointError

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2,
    "U16": 2, "I16": 2, "F32": 4, "U32": 4, "I32": 4, "F64": 8, "U64": 8, "I64": 8,
}  # fmt: skip
_MAX_HEADER = 100_000_000
_MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of one file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


def read_header(path: Path) -> dict[str, Entry]:
    """All tensors of a safetensors file, in file order.

    Raises CheckpointError, naming the file and the tensor, for a file that is missing, truncated or
    longer than its header says, or whose header overlaps, leaves holes, repeats a name or lies.
    """
    try:
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            start = handle.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                need = f"; its header would need {length}" if length >= 0 else ""
                raise CheckpointError(
                    f"{path}: not a safetensors file, or cut short ({size} bytes{need})"
                )
            text = handle.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    table = parse_json(text, f"{path}: the header", CheckpointError)
    data_start = 8 + length
    entries = [
        _entry(path, name, value, data_start)
        for name, value in table.items()
        if name != "__metadata__"
    ]
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    end = data_start
    for entry in entries:
        if entry.offset != end:
            raise CheckpointError(
                f"{path}: tensor {entry.name!r} starts at byte {entry.offset}, expected {end} "
                "(tensors must neither overlap nor leave holes)"
            )
        end += entry.num_bytes
    if end != size:
        raise CheckpointError(
            f"{path}: has {size} bytes but its header describes {end}; the file is "
            f"{'cut short' if size < end else 'longer than it should be'}; fetch it again"
        )
    return {entry.name: entry for entry in entries}


def _entry(path: Path, name: str, value: Any, data_start: int) -> Entry:
    where = f"{path}: tensor {name!r}"
    if not name.isprintable():
        raise CheckpointError(f"{where} has control characters in its name")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where}: dtype {reprlib.repr(dtype)} is not known here")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where}: shape {reprlib.repr(shape)} or data_offsets {reprlib.repr(offsets)} is "
            f"malformed; expected lists of numbers from 0 to 2^63, at most {_MAX_DIMS} of them"
        )
    num_bytes = offsets[1] - offsets[0]
    if num_bytes != prod(shape) * ITEM_BYTES[dtype]:
        raise CheckpointError(
            f"{where}: {dtype} {shape} needs {prod(shape) * ITEM_BYTES[dtype]} bytes, "
            f"data_offsets give {num_bytes}"
        )
    return Entry(name, dtype, tuple(shape), path, data_start + offsets[0], num_bytes)


def _naturals(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMS
        and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
    )
