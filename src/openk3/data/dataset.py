"""A folder of token shards with an index: what `k3 data build` makes and training reads.

    PATH/index.json          schema, vocabulary size, end-of-text id, hashes, splits and shards
    PATH/token_bytes.bin     uint16 per id: how many raw bytes that token stands for
    PATH/tokenizer.json      the tokenizer that made the ids, with tokenizer_config.json
    PATH/train-00000.k3tok   shards of each split

Every stored document ends with the end-of-text token, which stands for 0 bytes. Because each
token's raw length is known, bits per byte can be computed for any piece of a document.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from openk3._io import sha256_file
from openk3.data.shards import Shard, token_dtype
from openk3.errors import DataError, InputError

FORMAT = "openk3-tokens"
SCHEMA = 1
TOKEN_BYTES, TOKENIZER = "token_bytes.bin", "tokenizer.json"
_SMALL = 64 << 20  # below this many bytes a dataset is verified whole whenever it is opened


@dataclass
class ShardInfo:
    """One line of the index: a shard file, its counts and its digest."""

    file: str
    num_tokens: int
    num_documents: int
    sha256: str


@dataclass
class SplitInfo:
    """One split of the index. num_bytes counts raw text, without end-of-text tokens."""

    num_tokens: int = 0
    num_documents: int = 0
    num_bytes: int = 0
    shards: list[ShardInfo] = field(default_factory=list)


class Split:
    """The documents of one split as one stream of stored tokens, positions 0 to num_tokens - 1."""

    def __init__(self, name: str, info: SplitInfo, shards: list[Shard], parent: "Dataset") -> None:
        self.name = name
        self.dataset = parent
        self.num_tokens = info.num_tokens
        self.num_documents = info.num_documents
        self.num_bytes = info.num_bytes
        self._shards = shards
        self._token_base = np.cumsum([0, *(s.num_tokens for s in shards)])
        self._document_base = np.cumsum([0, *(s.num_documents for s in shards)])

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, Shard, int, int]]:
        if not 0 <= start <= stop <= self.num_tokens:
            raise InputError(
                f"range {start}:{stop} is outside split {self.name!r} of {self.num_tokens} tokens"
            )
        index = int(np.searchsorted(self._token_base, start, side="right")) - 1
        while start < stop:
            base = int(self._token_base[index])
            end = min(stop, int(self._token_base[index + 1]))
            yield base, self._shards[index], start - base, end - base
            start, index = end, index + 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Stored tokens [stop - start] int64 of the positions start to stop - 1."""
        pieces = [shard.tokens[a:b] for _, shard, a, b in self._pieces(start, stop)]
        return np.concatenate([np.empty(0, np.int64), *pieces]).astype(np.int64, copy=False)

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Positions in [start, stop) at which a document starts, int64, rising."""
        pieces = [
            base + shard.document_starts(a, b) for base, shard, a, b in self._pieces(start, stop)
        ]
        return np.concatenate([np.empty(0, np.int64), *pieces])

    def document(self, index: int) -> np.ndarray:
        """Stored tokens [n] int64 of one document, end-of-text token included."""
        if not 0 <= index < self.num_documents:
            raise InputError(
                f"document {index} is outside split {self.name!r} of {self.num_documents} documents"
            )
        which = int(np.searchsorted(self._document_base, index, side="right")) - 1
        shard, local = self._shards[which], index - int(self._document_base[which])
        start = int(shard.ends[local - 1]) if local else 0
        return shard.tokens[start : int(shard.ends[local])].astype(np.int64)


class Dataset:
    """An opened dataset folder. Headers and sizes are always checked.

    verify: True reads every file and compares checksums, False does not, None does it for data
    below 64 MiB. Raises DataError that names the bad file.

    Attributes: path, vocab_size, eot_id, token_bytes [vocab_size] int64, tokenizer_path (None if
    the folder holds none), tokenizer_sha256, source (what the builder noted), splits.
    """

    def __init__(self, path: str | Path, *, verify: bool | None = None) -> None:
        self.path = Path(path)
        index = _read_index(self.path)
        try:
            self.vocab_size = int(index["vocab_size"])
            self.eot_id = int(index["eot_id"])
            self.source: dict[str, Any] = dict(index["source"])
            self.source["skipped"] = dict(self.source.get("skipped", {}))
            digests = {self._file(name): str(d) for name, d in index["files"].items()}
            infos = {name: _split_info(value) for name, value in index["splits"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{self.path / 'index.json'} is corrupt: {type(error).__name__} {error}; "
                "build the data again"
            ) from error
        self.tokenizer_sha256 = digests.get(self.path / TOKENIZER)
        self.tokenizer_path = self.path / TOKENIZER if self.tokenizer_sha256 else None
        self._shards: list[tuple[Shard, ShardInfo]] = []
        self.splits = {name: self._open_split(name, info) for name, info in infos.items()}
        files = [shard.path for shard, _ in self._shards] + [p for p in digests if p.is_file()]
        small = sum(path.stat().st_size for path in files) < _SMALL
        if verify or (verify is None and small):
            self._verify(digests)
        self.token_bytes = self._read_token_bytes(self.path / TOKEN_BYTES)
        for split in self.splits.values():
            if (
                split.num_tokens
                and split.read(split.num_tokens - 1, split.num_tokens) != self.eot_id
            ):
                raise DataError(
                    f"{self.path / 'index.json'} is corrupt: split {split.name!r} does not end "
                    f"with the end-of-text id {self.eot_id}; build the data again"
                )

    def split(self, name: str) -> Split:
        """A split by name; DataError lists what there is."""
        if name not in self.splits:
            raise DataError(f"{self.path} has no split {name!r}; it has {sorted(self.splits)}")
        return self.splits[name]

    def summary(self) -> dict[str, Any]:
        """Counts for people and programs: JSON values only."""
        return {
            "path": str(self.path),
            "vocab_size": self.vocab_size,
            "tokenizer_sha256": self.tokenizer_sha256,
            "note": self.source.get("note", ""),
            "skipped": self.source.get("skipped", {}),
            "splits": {
                name: {
                    "num_documents": split.num_documents,
                    "num_bytes": split.num_bytes,
                    "num_tokens": split.num_tokens,
                    # end-of-text tokens are no part of the text's compression
                    "bytes_per_token": split.num_bytes / (split.num_tokens - split.num_documents),
                }
                for name, split in self.splits.items()
            },
        }

    def _file(self, name: str) -> Path:
        if Path(name).name != name:
            raise DataError(
                f"{self.path / 'index.json'} names the file {name!r} outside its folder"
            )
        return self.path / name

    def _open_split(self, name: str, info: SplitInfo) -> Split:
        shards = []
        for entry in info.shards:
            shard = Shard(self._file(entry.file))
            found = (shard.num_tokens, shard.num_documents, shard.dtype)
            if found != (entry.num_tokens, entry.num_documents, token_dtype(self.vocab_size)):
                raise DataError(
                    f"{shard.path} holds {found[0]} tokens of {found[1]} documents as {found[2]}, "
                    f"but the index says {entry.num_tokens} of {entry.num_documents}; it belongs "
                    "to another dataset, so build the data again"
                )
            shards.append(shard)
            self._shards.append((shard, entry))
        counts = [(s.num_tokens, s.num_documents) for s in shards]
        if tuple(map(sum, zip(*counts, strict=True))) != (info.num_tokens, info.num_documents):
            raise DataError(
                f"{self.path / 'index.json'} is corrupt: split {name!r} does not add up"
            )
        return Split(name, info, shards, self)

    def _verify(self, digests: dict[Path, str]) -> None:
        for path, digest in digests.items():
            if not path.is_file():
                raise DataError(f"{path} is missing; copy it again or build the data again")
            if sha256_file(path) != digest:
                raise DataError(f"{path} is corrupt: its sha256 is not the index's")
        for shard, entry in self._shards:
            shard.verify(entry.sha256)

    def _read_token_bytes(self, path: Path) -> np.ndarray:
        try:
            lengths = np.frombuffer(path.read_bytes(), "<u2")
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read {path}: {error}") from error
        if len(lengths) != self.vocab_size:
            raise DataError(f"{path} is corrupt: {len(lengths)} entries for {self.vocab_size} ids")
        return lengths.astype(np.int64)


def _read_index(path: Path) -> dict[str, Any]:
    file = path / "index.json"
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path} is not a token dataset: it has no index.json") from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {error}") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise DataError(f"{file} is not the index of a token dataset")
    if index.get("schema") != SCHEMA:
        raise DataError(
            f"{file} has schema {index.get('schema')}, this version reads {SCHEMA}; "
            "build the data again"
        )
    return index


def _split_info(value: dict[str, Any]) -> SplitInfo:
    shards = [
        ShardInfo(str(s["file"]), int(s["num_tokens"]), int(s["num_documents"]), str(s["sha256"]))
        for s in value["shards"]
    ]
    if not shards:
        raise ValueError("a split has no shards")
    counts = (int(value[key]) for key in ("num_tokens", "num_documents", "num_bytes"))
    return SplitInfo(*counts, shards=shards)
