"""One token shard: a file of token ids and document ends, written as a stream, read by mapping.

Layout, little-endian: a 64-byte header (magic, schema version, bytes per token, number of tokens,
number of documents), the token ids as uint16 or uint32, zeros up to a multiple of 8, then for each
document the exclusive end of its tokens as uint64. Documents are non-empty and never span shards.
"""

import mmap
import struct
from array import array
from pathlib import Path

import numpy as np

from openk3._io import sha256_file
from openk3.errors import DataError, InputError

SCHEMA = 1
_MAGIC = b"K3TOKENS"
_HEADER = struct.Struct("<8sIIQQ32x")


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest dtype that holds ids below `vocab_size`: uint16 or uint32."""
    if not 0 < vocab_size <= 2**32:
        raise InputError(f"vocab_size is {vocab_size}; allowed: 1 to 2**32")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def _ends_offset(num_tokens: int, itemsize: int) -> int:
    return _HEADER.size + -(-num_tokens * itemsize // 8) * 8


def shard_size(num_tokens: int, num_documents: int, dtype: np.dtype) -> int:
    """Exact size in bytes of a shard file."""
    return _ends_offset(num_tokens, dtype.itemsize) + 8 * num_documents


class ShardWriter:
    """Append documents to a new shard file; holds 8 bytes per document in memory until `close`.

    The header is written last, so that a file whose writer died is refused by `Shard`.
    """

    def __init__(self, path: str | Path, dtype: np.dtype) -> None:
        self.path = Path(path)
        self.dtype = dtype
        self.num_tokens = 0
        self._ends = array("Q")
        self._handle = open(self.path, "wb")  # noqa: SIM115  (closed by `close`)
        self._handle.write(bytes(_HEADER.size))

    @property
    def num_documents(self) -> int:
        return len(self._ends)

    def add(self, ids: np.ndarray) -> None:
        """Append one document: ids [n], n > 0, already checked against the vocabulary."""
        if ids.ndim != 1 or ids.size == 0:
            raise InputError(f"a document must be a non-empty vector of ids, got shape {ids.shape}")
        self._handle.write(ids.astype(self.dtype).tobytes())
        self.num_tokens += ids.size
        self._ends.append(self.num_tokens)

    def close(self) -> None:
        """Write the document ends and the header."""
        if self._handle.closed:
            return
        with self._handle as handle:
            handle.write(bytes(_ends_offset(self.num_tokens, self.dtype.itemsize) - handle.tell()))
            handle.write(np.asarray(self._ends, dtype="<u8").tobytes())
            handle.seek(0)
            counts = (self.dtype.itemsize, self.num_tokens, self.num_documents)
            handle.write(_HEADER.pack(_MAGIC, SCHEMA, *counts))

    def abandon(self) -> None:
        """Close the file without making it valid."""
        self._handle.close()


class Shard:
    """A mapped shard file. `tokens` [num_tokens] uint16 or uint32; `ends` [num_documents] uint64.

    Opening checks the header, the exact size, and that the ends rise to num_tokens at the last.
    Raises DataError that names the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        raw = _map(self.path)
        self.dtype, self.num_tokens, self.num_documents = _parse_header(self.path, raw)
        split = _ends_offset(self.num_tokens, self.dtype.itemsize)
        self.tokens = np.frombuffer(raw, self.dtype, self.num_tokens, _HEADER.size)
        self.ends = np.frombuffer(raw, "<u8", self.num_documents, split)
        last = int(self.ends[-1]) if self.num_documents else 0
        if last != self.num_tokens:
            raise DataError(
                f"{self.path} is corrupt: its documents end at token {last} of {self.num_tokens}; "
                "build the data again"
            )

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Positions in [start, stop) at which a document starts, int64, rising."""
        low, high = np.searchsorted(self.ends, np.asarray([start, stop], dtype="<u8"))
        starts = self.ends[low:high].astype(np.int64)
        return np.concatenate([[0], starts]) if start == 0 < stop else starts

    def verify(self, sha256: str) -> None:
        """Read the whole file and compare its digest; DataError names the file."""
        found = sha256_file(self.path)
        if found != sha256:
            raise DataError(
                f"{self.path} is corrupt: its sha256 is {found[:16]}..., the index says "
                f"{sha256[:16]}...; copy it again or build the data again"
            )


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise DataError(f"cannot read token shard {path}: {error}") from error


def _parse_header(path: Path, raw: mmap.mmap) -> tuple[np.dtype, int, int]:
    if len(raw) < _HEADER.size or raw[:8] != _MAGIC:
        raise DataError(f"{path} is not a complete token shard (no header); build the data again")
    _, schema, itemsize, num_tokens, num_documents = _HEADER.unpack(raw[: _HEADER.size])
    if schema != SCHEMA or itemsize not in (2, 4):
        raise DataError(
            f"{path} has schema {schema} with {itemsize}-byte tokens; this version reads schema "
            f"{SCHEMA} with 2 or 4; build the data again"
        )
    dtype = np.dtype(f"<u{itemsize}")
    expected = shard_size(num_tokens, num_documents, dtype)
    if len(raw) != expected:
        state = "truncated" if len(raw) < expected else "corrupt"
        raise DataError(
            f"{path} is {state}: it has {len(raw)} bytes, its header promises {expected}; "
            "copy it again or build the data again"
        )
    return dtype, num_tokens, num_documents
