"""A sharded training checkpoint as a model folder: surveyed by its metadata, read row by row."""

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from openk3.checkpoint.hf.header import Entry
from openk3.checkpoint.hf.layout import Parameter
from openk3.checkpoint.hf.read import DTYPES, NAMES
from openk3.checkpoint.sharded import Box, Reader
from openk3.errors import CheckpointError
from openk3.ops import mx

PART = "model"


def entries_of(reader: Reader) -> dict[str, Entry]:
    """Its weights by name, as the headers of a model folder would list them."""
    entries = {}
    for name, facts in reader.part(PART).items():
        dtype, size = facts.properties.dtype, prod(facts.size)
        shape, path = tuple(facts.size), reader.path / ".metadata"
        entries[name] = Entry(name, NAMES[dtype], shape, path, 0, size * dtype.itemsize)
    return entries


class ShardedSource:
    """Its weights, read when they are asked for; a `Source`."""

    def __init__(self, path: Path) -> None:
        self._path, self._reader = path, Reader(path)
        self._entries = entries_of(self._reader)

    def stored(self, parameter: Parameter) -> str:
        return self._entries[parameter.name].dtype

    def values(self, parameter: Parameter, expert: int | None = None) -> Tensor:
        entry = self._entries[parameter.name]
        first, count = (0, entry.shape[0]) if expert is None else (expert, 1)
        rows = torch.empty(count, *entry.shape[1:], dtype=DTYPES[entry.dtype])
        self._reader.fill(PART, {parameter.name: Box(rows, entry.shape, first)})
        return rows if expert is None else rows[0]

    def packed(self, parameter: Parameter, expert: int) -> mx.Quantized:
        raise CheckpointError(f"{self._path}: {parameter.name} is float32, not MXFP4")

    def where(self, parameter: Parameter, expert: int | None = None) -> str:
        name = parameter.name if expert is None else f"{parameter.name}[{expert}]"
        return f"{self._path}: {name}"
