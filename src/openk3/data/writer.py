"""Writing a dataset folder: streaming, bounded memory, complete or absent.

The folder's layout is described in `openk3.data.dataset`, which reads it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from openk3._io import atomic_dir, sha256_file, write_json
from openk3.data.dataset import FORMAT, SCHEMA, TOKEN_BYTES, ShardInfo, SplitInfo
from openk3.data.shards import ShardWriter, token_dtype
from openk3.errors import DataError, InputError
from openk3.text.tokenizer import Tokenizer


class DatasetWriter:
    """Streams documents into shards of named splits. Made by `write_dataset`."""

    def __init__(
        self, folder: Path, token_bytes: np.ndarray, eot_id: int, max_shard_tokens: int
    ) -> None:
        self.folder = folder
        self.splits: dict[str, SplitInfo] = {}
        self.token_bytes = token_bytes
        self._vocab_size = len(token_bytes)
        self._eot_id = eot_id
        self._max_shard_tokens = max_shard_tokens
        self._open: dict[str, ShardWriter] = {}

    def add(self, split: str, ids: list[int] | np.ndarray) -> None:
        """Append one document's ids [n] (without end-of-text) to `split`.

        Raises InputError when the document is empty or an id is outside the vocabulary.
        """
        ids = np.asarray(ids, dtype=np.int64)
        if ids.ndim != 1 or ids.size == 0:
            raise InputError(f"a document must be a non-empty vector of ids, got shape {ids.shape}")
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise InputError(
                f"token id {ids.min() if ids.min() < 0 else ids.max()} is outside the vocabulary "
                f"of {self._vocab_size}; the tokenizer and vocab_size do not fit each other"
            )
        info = self.splits.setdefault(split, SplitInfo())
        shard = self._open.get(split) or self._start_shard(split, info)
        shard.add(np.append(ids, self._eot_id))
        info.num_tokens += ids.size + 1
        info.num_documents += 1
        info.num_bytes += int(self.token_bytes[ids].sum(dtype=np.int64))
        if shard.num_tokens >= self._max_shard_tokens:
            self._end_shard(split)

    def _start_shard(self, split: str, info: SplitInfo) -> ShardWriter:
        name = f"{split}-{len(info.shards):05d}.k3tok"
        shard = ShardWriter(self.folder / name, token_dtype(self._vocab_size))
        self._open[split] = shard
        return shard

    def _end_shard(self, split: str) -> None:
        shard = self._open.pop(split)
        shard.close()
        digest = sha256_file(shard.path)
        self.splits[split].shards.append(
            ShardInfo(shard.path.name, shard.num_tokens, shard.num_documents, digest)
        )

    def finish(self) -> None:
        for split in list(self._open):
            self._end_shard(split)

    def abandon(self) -> None:
        for shard in self._open.values():
            shard.abandon()


@contextmanager
def write_dataset(
    path: str | Path,
    *,
    token_bytes: np.ndarray,
    eot_id: int,
    tokenizer: Tokenizer | None = None,
    source: Mapping[str, Any] | None = None,
    max_shard_tokens: int = 1 << 26,
) -> Iterator[DatasetWriter]:
    """Build a dataset folder; it appears under `path` complete, or not at all.

    token_bytes [vocab_size]: raw bytes each token stands for (0 for special tokens). `tokenizer`
    is saved into the folder. `source` is any JSON value to keep in the index; it is
    read when the block ends, so it may be filled meanwhile. Memory is bounded by one document plus
    8 bytes per document of a shard.

    Raises DataError when `path` exists or no document was added, StorageError when the disk is
    full; then `path` does not exist.
    """
    path = Path(path)
    if path.exists():
        raise DataError(f"{path} exists already; remove it or choose another folder")
    lengths = np.asarray(token_bytes, dtype="<u2")
    if not np.array_equal(lengths, token_bytes):
        raise InputError("token_bytes must be whole numbers from 0 to 65535")
    if not 0 <= eot_id < len(lengths) or lengths[eot_id] != 0:
        raise InputError(f"eot_id {eot_id} must be a vocabulary id that stands for 0 bytes")
    with atomic_dir(path) as folder:
        writer = DatasetWriter(folder, lengths, eot_id, max_shard_tokens)
        try:
            yield writer
            writer.finish()
        finally:
            writer.abandon()
        if not writer.splits:
            raise DataError(f"nothing to write to {path}: the corpus holds no text document")
        _write_index(folder, writer, lengths, eot_id, tokenizer, source)


def _write_index(
    folder: Path,
    writer: DatasetWriter,
    lengths: np.ndarray,
    eot_id: int,
    tokenizer: Tokenizer | None,
    source: Mapping[str, Any] | None,
) -> None:
    shards = {shard.file for info in writer.splits.values() for shard in info.shards}
    (folder / TOKEN_BYTES).write_bytes(lengths.tobytes())
    if tokenizer is not None:
        tokenizer.save(folder)
    others = sorted(path.name for path in folder.iterdir() if path.name not in shards)
    index = {
        "format": FORMAT,
        "schema": SCHEMA,
        "vocab_size": len(lengths),
        "eot_id": eot_id,
        "files": {name: sha256_file(folder / name) for name in others},
        "splits": {name: asdict(info) for name, info in writer.splits.items()},
        "source": dict(source or {}),
    }
    write_json(folder / "index.json", index)
