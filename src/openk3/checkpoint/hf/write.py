"""Writes a model folder: shards of bounded size, their index, config and the files beside them.

Names, shapes and dtypes are known before any data is, so every file is laid out first and tensors
are written to their places as they are produced, by several threads. The folder appears whole
under its name, or not at all.
"""

import json
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from openk3._io import atomic_dir, require_disk
from openk3.checkpoint.hf.folder import INDEX
from openk3.checkpoint.hf.header import ITEM_BYTES
from openk3.checkpoint.hf.layout import Tensor, from_file
from openk3.checkpoint.hf.read import NAMES, run_jobs
from openk3.errors import CheckpointError, InputError


class Produced(NamedTuple):
    """A tensor as it is to be stored, or row `index` of one."""

    name: str
    value: torch.Tensor
    index: int | None = None


Job = Callable[[], Iterable[Produced]]

COMPANIONS = (
    "generation_config.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE",
)
"""Files that travel with the weights; none is read here."""


def write_folder(
    path: str | Path,
    groups: Iterable[list[Tensor]],
    jobs: Iterable[Job],
    *,
    config: dict[str, Any],
    companions: Path | None,
    max_shard_bytes: float,
    progress: Callable[[int], None] | None = None,
    extra: Callable[[dict[str, str]], dict[str, Any]],
) -> None:
    """Create the folder `path` (absent or empty before).

    A group starts a new shard. `companions` is a folder whose tokenizer and generation files are
    copied along; `extra` maps names of files to be written unless they come with it to JSON
    values, made with the index at hand. Raises InputError for a folder in use,
    StorageError when the disk is full, and what a job raises; nothing is left behind.
    """
    path = Path(path)
    check_target(path, max_shard_bytes)
    shards = list(plan_shards(groups, int(max_shard_bytes)))
    total = sum(tensor.num_bytes for shard in shards for tensor in shard)
    require_disk(path, total, f"writing {path}")
    with atomic_dir(path) as folder:
        with ShardWriter(folder, shards) as writer:
            run_jobs((lambda job=job: writer.store(job()) for job in jobs), progress=progress)
            writer.check_complete()
        _json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": writer.weight_map})
        _json(folder / "config.json", config)
        _copy_companions(companions, folder)
        for name, value in extra(writer.weight_map).items():
            if not (folder / name).exists():
                _json(folder / name, value)


def check_target(path: Path, max_shard_bytes: float = 1) -> None:
    """Raise InputError if a model folder cannot be created at `path`."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists and is not an empty folder; choose another")
    if max_shard_bytes < 1:
        raise InputError(f"max_shard_bytes is {max_shard_bytes}; it must be at least 1")


def plan_shards(groups: Iterable[list[Tensor]], max_shard_bytes: int) -> Iterator[list[Tensor]]:
    """Cut groups into shards of at most `max_shard_bytes` (one tensor at least).

    A stack that fits into one file is not cut, so that loading can map it.
    """
    for group in groups:
        shard: list[Tensor] = []
        size = 0
        for _, stack in groupby(group, key=lambda tensor: from_file(tensor.name)[::2]):
            tensors = list(stack)
            whole = sum(tensor.num_bytes for tensor in tensors)
            if shard and size + whole > max_shard_bytes >= whole:
                yield shard
                shard, size = [], 0
            for tensor in tensors:
                if shard and size + tensor.num_bytes > max_shard_bytes:
                    yield shard
                    shard, size = [], 0
                shard.append(tensor)
                size += tensor.num_bytes
        if shard:
            yield shard


class ShardWriter:
    """Files of a planned size that tensors are written into, in any order, by any thread."""

    def __init__(self, folder: Path, shards: list[list[Tensor]]) -> None:
        self.weight_map: dict[str, str] = {}
        self._places: dict[str, tuple[int, int, Tensor]] = {}
        self._left: dict[str, int] = {}
        self._files: list[int] = []
        self._lock = threading.Lock()
        for number, tensors in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
            self._start(folder / name, tensors)

    def _start(self, path: Path, tensors: list[Tensor]) -> None:
        # wide items first, so that every tensor is aligned to its item; stacks stay together
        tensors = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in tensors:
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.num_bytes],
            }
            end += tensor.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._files.append(handle)
        _write_all(handle, struct.pack("<Q", len(text)) + text, 0)
        os.ftruncate(handle, 8 + len(text) + end)
        for tensor in tensors:
            if tensor.name in self._places:
                raise InputError(f"tensor {tensor.name!r} is planned twice")
            offset = 8 + len(text) + header[tensor.name]["data_offsets"][0]
            self._places[tensor.name] = (handle, offset, tensor)
            self._left[tensor.name] = tensor.num_bytes
            self.weight_map[tensor.name] = path.name

    def store(self, produced: Iterable[Produced]) -> int:
        """Write tensors to their places; returns the bytes written."""
        total = 0
        for name, value, index in produced:
            handle, offset, planned = self._places[name]
            shape = planned.shape if index is None else planned.shape[1:]
            if NAMES.get(value.dtype) != planned.dtype or tuple(value.shape) != shape:
                raise CheckpointError(
                    f"{name} came out as {value.dtype} {list(value.shape)}, planned as "
                    f"{planned.dtype} {list(shape)}"
                )
            data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            _write_all(handle, data.data, offset + (index or 0) * data.nbytes)
            total += data.nbytes
            with self._lock:
                self._left[name] -= data.nbytes
        return total

    def check_complete(self) -> None:
        """Every planned byte must have been written once."""
        odd = [name for name, left in self._left.items() if left]
        if odd:
            raise CheckpointError(f"{len(odd)} tensors were not written whole: {odd[:5]}")

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._files:
            os.close(handle)


def _write_all(handle: int, data: bytes | memoryview, offset: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], offset + done)


def _copy_companions(source: Path | None, folder: Path) -> None:
    if source is None:
        return
    for name in [*COMPANIONS, *(path.name for path in sorted(source.glob("*.py")))]:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
