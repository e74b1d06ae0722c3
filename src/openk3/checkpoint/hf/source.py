"""Where weights come from when a folder is written; here, another folder.

A source answers for each parameter of `layout.parameters`: how it is stored, its values, and for
routed experts the MXFP4 bytes where it has them.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from openk3.checkpoint.hf.folder import Survey
from openk3.checkpoint.hf.header import Entry
from openk3.checkpoint.hf.layout import Parameter
from openk3.checkpoint.hf.read import DTYPES, FileReader, allocate
from openk3.errors import CheckpointError
from openk3.ops import mx


class Source(Protocol):
    """Weights, one tensor at a time."""

    def stored(self, parameter: Parameter) -> str:
        """BF16, F16, F32 or MXFP4."""
        ...

    def values(self, parameter: Parameter, expert: int | None = None) -> Tensor:
        """The parameter, or one expert's matrix, in its stored dtype (MXFP4 as bfloat16)."""
        ...

    def packed(self, parameter: Parameter, expert: int) -> mx.Quantized:
        """One expert's matrix as it is stored in MXFP4."""
        ...

    def where(self, parameter: Parameter, expert: int | None = None) -> str:
        """What messages call the parameter, or one expert's matrix."""
        ...


class FolderSource:
    """The tensors of a surveyed folder, read when they are asked for."""

    def __init__(self, found: Survey, reader: FileReader) -> None:
        self._stacks, self._reader = found.stacks, reader

    def stored(self, parameter: Parameter) -> str:
        return self._stacks[parameter.name].stored_dtype

    def values(self, parameter: Parameter, expert: int | None = None) -> Tensor:
        stack = self._stacks[parameter.name]
        if stack.packed:
            assert expert is not None, "MXFP4 is read one expert at a time"
            return mx.dequantize(*self.packed(parameter, expert), dtype=torch.bfloat16)
        value = self._read(stack.pieces["weight"], expert)
        return value if expert is not None else unpad_heads(value, parameter)

    def packed(self, parameter: Parameter, expert: int) -> mx.Quantized:
        pieces = self._stacks[parameter.name].pieces
        return mx.Quantized(
            self._read(pieces["weight_packed"], expert), self._read(pieces["weight_scale"], expert)
        )

    def where(self, parameter: Parameter, expert: int | None = None) -> str:
        entries = next(iter(self._stacks[parameter.name].pieces.values()))
        if len(entries) > 1 or expert is None:
            entry = entries[expert or 0]
            return f"{entry.path}: {entry.name}"
        return f"{entries[0].path}: {entries[0].name}[{expert}]"

    def _read(self, entries: Sequence[Entry], expert: int | None) -> Tensor:
        if len(entries) > 1 or expert is None:
            return self._reader.read(entries[expert or 0])
        whole = entries[0]  # one tensor that stacks all experts
        out = allocate(whole.shape[1:], DTYPES[whole.dtype])
        data = out.view(-1).view(torch.uint8)
        self._reader.read_bytes(whole, whole.offset + expert * data.numel(), data)
        return out


def unpad_heads(value: Tensor, parameter: Parameter) -> Tensor:
    """A file's A_log without the zeros behind its heads. Raises CheckpointError if not zeros."""
    if tuple(value.shape) == parameter.shape or not parameter.name.endswith(".A_log"):
        return value
    heads = parameter.shape[0]
    if bool(value[heads:].any()):
        raise CheckpointError(
            f"{parameter.name} has {value.numel()} entries for {heads} heads, and those beyond "
            f"{heads} are not zero; does config.json name another number of heads?"
        )
    return value[:heads]
