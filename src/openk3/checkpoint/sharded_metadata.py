"""The `.metadata` file of torch.distributed.checkpoint: a pickle, of which only its own classes are
loaded, so that a checkpoint from elsewhere cannot run anything."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from openk3.errors import CheckpointError

_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(
        (module, name)
        for module in ("pathlib", "pathlib._local")  # where Python 3.13 keeps them
        for name in ("PosixPath", "WindowsPath")
    ),
}
_UNREADABLE = (
    OSError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, ImportError,
    RecursionError, MemoryError, pickle.UnpicklingError,
)  # fmt: skip
"""What pickle raises on bytes that are none."""


def read_metadata(path: Path) -> Metadata:
    """The metadata in a file. Raises CheckpointError where it is damaged, or names anything that
    no checkpoint needs; that is then not loaded."""
    try:
        with open(path, "rb") as file:
            metadata = _Unpickler(file).load()
    except _UNREADABLE as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} holds {type(metadata).__name__}, not checkpoint metadata")
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _PLAIN or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
