"""Tensor data out of safetensors files: mapped where nothing has to change, else read in pieces.

Reads go through small buffers that stay in cache, on several threads, so converting costs little
more than reading, and memory beyond the result is a few MiB. Nothing is ever unpickled.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from openk3.checkpoint.hf.header import ITEM_BYTES, Entry
from openk3.errors import CheckpointError
from openk3.ops import mx
from openk3.ops.mx import e2m1

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BUFFER_BYTES = 1 << 20
_PACKED_BYTES = 256 << 10  # MXFP4: its indices take four bytes each
_JOB_BYTES = 16 << 20
_MAPPED_BYTES = 64 << 10  # tensors from here on get mappings of their own


def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for a tensor that does not live long: malloc gives back what was freed, unzeroed."""
    num_bytes = prod(shape) * dtype.itemsize
    return torch.from_numpy(np.empty(num_bytes, np.uint8)).view(dtype).view(*shape)


def allocate_lasting(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Fresh memory for a tensor of a model, in huge pages where the system has them.

    Linux places such mappings side by side and merges them, so that even the ends of tensors and
    those smaller than a huge page share one; malloc's headers would part them. The tensor owns its
    mapping. Raises MemoryError like any allocation.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < _MAPPED_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return allocate(shape, dtype)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no address space or too many mappings: malloc may still have some
        return allocate(shape, dtype)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


class FileReader:
    """Open files and mappings of one model folder; threads may share it.

    mapped=False reads everything into memory of its own, for processes whose address space is
    limited.
    """

    def __init__(self, *, mapped: bool = True) -> None:
        self.mapped = mapped
        self._lock = threading.Lock()
        self._files: dict[Path, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._local = threading.local()
        weakref.finalize(self, _close, self._files)

    def close(self) -> None:
        """Close the files; mapped tensors stay valid."""
        with self._lock:
            _close(self._files)
            self._maps.clear()

    def __enter__(self) -> "FileReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def view(self, entries: Sequence[Entry]) -> Tensor | None:
        """One tensor, or the stack of equal tensors, as a view of its file; else None.

        A stack can be a view when its tensors lie in one file at equal distances. Writing to a view
        changes private pages, never the file.
        """
        first, size = entries[0], ITEM_BYTES[entries[0].dtype]
        steps = {b.offset - a.offset for a, b in pairwise(entries)}
        if not self.mapped or len(steps) > 1 or any(e.path != first.path for e in entries):
            return None
        step = steps.pop() if steps else 0
        if first.offset % size or step % size or step < 0 or not first.num_bytes:
            return None
        whole = torch.frombuffer(
            self._map(first.path),
            dtype=DTYPES[first.dtype],
            offset=first.offset,
            count=(entries[-1].offset + first.num_bytes - first.offset) // size,
        )
        if len(entries) == 1:
            return whole.view(first.shape)
        inner = torch.empty(first.shape, device="meta").stride()
        return whole.as_strided((len(entries), *first.shape), (step // size, *inner))

    def read(self, entry: Entry, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor in fresh memory, as stored or converted."""
        out = allocate(entry.shape, dtype or DTYPES[entry.dtype])
        for job in self.copy_jobs(entry, out):
            job()
        return out

    def copy_jobs(self, entry: Entry, out: Tensor) -> Iterable[Callable[[], int]]:
        """Pieces of work that fill contiguous `out` with a tensor; each returns its file bytes."""
        size = ITEM_BYTES[entry.dtype]
        flat, step = out.view(-1), _JOB_BYTES // size
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            yield lambda piece=piece, start=start: self._copy(
                entry, entry.offset + start * size, piece
            )

    def dequantise_jobs(
        self, packed: Entry, scale: Entry, out: Tensor
    ) -> Iterable[Callable[[], int]]:
        """Pieces of work that fill contiguous `out` with the values of an MXFP4 tensor."""
        blocks, step = out.view(-1, mx.BLOCK), _JOB_BYTES // (mx.BLOCK // 2)
        for start in range(0, blocks.shape[0], step):
            piece = blocks[start : start + step]
            yield lambda piece=piece, start=start: self._dequantise(packed, scale, start, piece)

    def read_bytes(self, entry: Entry, offset: int, into: Tensor) -> None:
        """Fill uint8 `into` from byte `offset` of the file. Raises CheckpointError if cut short."""
        view, done = into.numpy().data, 0
        while done < len(view):
            try:
                count = os.preadv(self._file(entry.path), [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"cannot read {entry.path}: {error.strerror or error}"
                ) from error
            if count == 0:
                raise CheckpointError(f"{entry.path}: {entry.name} is cut short")
            done += count

    def _copy(self, entry: Entry, offset: int, out: Tensor) -> int:
        stored = DTYPES[entry.dtype]
        num_bytes = out.numel() * stored.itemsize
        if stored == out.dtype:
            self.read_bytes(entry, offset, out.view(torch.uint8))
            return num_bytes
        buffer = self._buffer(0, _BUFFER_BYTES)
        for done in range(0, num_bytes, _BUFFER_BYTES):
            part = buffer[: min(_BUFFER_BYTES, num_bytes - done)]
            self.read_bytes(entry, offset + done, part)
            start, count = done // stored.itemsize, part.numel() // stored.itemsize
            out[start : start + count].copy_(part.view(stored))
        return num_bytes

    def _dequantise(self, packed: Entry, scale: Entry, start: int, out_NB: Tensor) -> int:
        half, step = mx.BLOCK // 2, _PACKED_BYTES // (mx.BLOCK // 2)
        data, codes = self._buffer(0, _BUFFER_BYTES), self._buffer(1, step)
        for done in range(0, out_NB.shape[0], step):
            out = out_NB[done : done + step]
            count, first = out.shape[0], start + done
            self.read_bytes(packed, packed.offset + first * half, data[: count * half])
            self.read_bytes(scale, scale.offset + first, codes[:count])
            e2m1.decode_into(data[: count * half].view(-1, half), codes[:count], out)
        return out_NB.shape[0] * (half + 1)

    def _buffer(self, slot: int, num_bytes: int) -> Tensor:
        name = f"buffer{slot}"
        if not hasattr(self._local, name):
            setattr(self._local, name, torch.empty(num_bytes, dtype=torch.uint8))
        return getattr(self._local, name)

    def _file(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
            return self._files[path]

    def _map(self, path: Path) -> mmap.mmap:
        handle = self._file(path)
        with self._lock:
            if path not in self._maps:
                no_reserve = getattr(mmap, "MAP_NORESERVE", 0)
                self._maps[path] = mmap.mmap(handle, 0, flags=mmap.MAP_PRIVATE | no_reserve)
            return self._maps[path]


def adjoining(*parts: Sequence[Entry]) -> Iterator[tuple[slice, list[Entry]]]:
    """Runs of a stack in which the tensors of every part follow each other in one file, each run
    as one tensor: small experts are then read in large pieces."""
    start, count = 0, len(parts[0])
    for end in range(1, count + 1):
        if end == count or not all(_follows(part[end - 1], part[end]) for part in parts):
            yield slice(start, end), [_join(part[start:end]) for part in parts]
            start = end


def _follows(a: Entry, b: Entry) -> bool:
    return (a.path, a.dtype, a.offset + a.num_bytes) == (b.path, b.dtype, b.offset)


def _join(entries: Sequence[Entry]) -> Entry:
    first, num_bytes = entries[0], sum(entry.num_bytes for entry in entries)
    shape = (len(entries), *first.shape)
    return Entry(first.name, first.dtype, shape, first.path, first.offset, num_bytes)


def _close(files: dict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])


def run_jobs(
    jobs: Iterable[Callable[[], int]],
    *,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Run pieces of work on a few threads; the first error stops the rest and is raised."""
    workers = workers or min(8, os.cpu_count() or 1)
    jobs = list(jobs)
    size = max(1, len(jobs) // (workers * 32))  # a thousand tiny tensors are not a thousand tasks
    with ThreadPoolExecutor(workers) as pool:
        futures = [
            pool.submit(lambda batch: sum(job() for job in batch), jobs[start : start + size])
            for start in range(0, len(jobs), size)
        ]
        try:
            for future in futures:
                done = future.result()
                if progress:
                    progress(done)
        finally:
            for future in futures:
                future.cancel()
