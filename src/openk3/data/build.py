"""From documents to a dataset folder: deduplicate, hold out, train a tokenizer, write shards.

Three passes over the source: scan (duplicates, sizes), tokenizer training, writing. Held-out
documents are chosen by a hash of their names, so a document keeps its split when others come or go.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from openk3._io import require_disk
from openk3.data.dataset import Dataset
from openk3.data.sources import Document, Source
from openk3.data.writer import DatasetWriter, write_dataset
from openk3.errors import ConfigError, DataError
from openk3.text.special_tokens import EOS
from openk3.text.tokenizer import Tokenizer

TRAIN, HELD_OUT = "train", "heldout"
_TOKENIZER_BYTES = 64 << 20
_BATCH_BYTES = 4 << 20


@dataclass
class _Scan:
    """What the first pass learns; documents are known by their place in the source."""

    num_documents: int = 0
    num_bytes: int = 0
    duplicates: set[int] = field(default_factory=set)
    held_out: set[int] = field(default_factory=set)
    skipped: Counter[str] = field(default_factory=Counter)


def name_hash(name: str, purpose: str) -> float:
    """A number in [0, 1) that depends on a document's name alone."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little") / 2**64


def build(
    source: Source,
    out: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    held_out: float = 0.02,
    end_of_text: str = EOS,
    note: str = "",
    max_shard_tokens: int = 1 << 26,
) -> Dataset:
    """Write the documents of `source` as a dataset folder `out` and open it.

    Give a `tokenizer`, or a `vocab_size` to train one of. `held_out` is the expected share of
    documents in split "heldout" (at least one when it is above 0); the others are in "train".
    Identical documents are kept once. `end_of_text` is the special token after each document.
    The report (counts, skipped files, `note`) is `Dataset.source`.

    Raises ConfigError for options that do not fit each other, DataError when there is no text, or
    one document only and some must be held out; then nothing is written.
    """
    if (tokenizer is None) == (vocab_size is None):
        raise ConfigError("give either a tokenizer or a vocab_size to train one of")
    if not 0 <= held_out < 1:
        raise ConfigError(f"held_out is {held_out}; it is a share from 0 to below 1")
    if Path(out).exists():
        raise DataError(f"{out} exists already; remove it or choose another folder")
    scan = _scan(source, held_out)
    require_disk(Path(out), scan.num_bytes, "building the data")  # 2 to 4 bytes text, and ids
    if tokenizer is None:
        tokenizer = _train_tokenizer(source, scan, vocab_size or 0)
    report: dict[str, Any] = {"note": note}
    with write_dataset(
        out,
        token_bytes=token_lengths(tokenizer),
        eot_id=tokenizer.special_id(end_of_text),
        tokenizer=tokenizer,
        source=report,
        max_shard_tokens=max_shard_tokens,
    ) as writer:
        _write(source, scan, tokenizer, writer)
        report["skipped"] = dict(sorted(scan.skipped.items()))
    return Dataset(out)


def token_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """[vocab_size] int64: raw bytes each id stands for, 0 for special tokens."""
    ids = range(tokenizer.vocab_size)
    return np.array([0 if tokenizer.is_special(i) else len(tokenizer.token_bytes(i)) for i in ids])


def _scan(source: Source, held_out: float) -> _Scan:
    scan, seen, first = _Scan(), set(), (2.0, -1)
    for place, (name, text) in enumerate(source):
        digest = hashlib.blake2b(text, digest_size=16).digest()
        if digest in seen:
            scan.duplicates.add(place)
            continue
        seen.add(digest)
        scan.num_documents += 1
        scan.num_bytes += len(text)
        score = name_hash(name, "held out")
        first = min(first, (score, place))
        if score < held_out:
            scan.held_out.add(place)
    scan.skipped = source.skipped + Counter(duplicate=len(scan.duplicates))
    if scan.num_documents == 0:
        counts = ", ".join(f"{n} {reason}" for reason, n in sorted(scan.skipped.items()))
        raise DataError(f"the corpus holds no text document (skipped: {counts or 'nothing'})")
    if held_out > 0 and scan.num_documents == 1:
        raise DataError(
            "the corpus is one document, so none can be held out; cut it into smaller documents "
            "(--document-bytes 65536) or hold out nothing (--held-out 0)"
        )
    if held_out > 0 and len(scan.held_out) in (0, scan.num_documents):
        scan.held_out = {first[1]}
    return scan


def _documents(source: Source, scan: _Scan) -> Iterator[tuple[Document, str]]:
    for place, document in enumerate(source):
        if place not in scan.duplicates:
            yield document, HELD_OUT if place in scan.held_out else TRAIN


def _train_tokenizer(source: Source, scan: _Scan, vocab_size: int) -> Tokenizer:
    """BPE of the training documents, of a sample by name when they are many."""
    from openk3.text.train_tokenizer import train

    share = _TOKENIZER_BYTES / scan.num_bytes
    return train(
        (
            text.decode()
            for (name, text), split in _documents(source, scan)
            if split == TRAIN and (share >= 1 or name_hash(name, "tokenizer") < share)
        ),
        vocab_size,
    )


def _write(source: Source, scan: _Scan, tokenizer: Tokenizer, writer: DatasetWriter) -> None:
    waiting: list[tuple[str, str]] = []
    size = 0
    for (_, text), split in _documents(source, scan):
        waiting.append((split, text.decode()))
        size += len(text)
        if size >= _BATCH_BYTES:
            _write_batch(waiting, tokenizer, writer)
            waiting, size = [], 0
    _write_batch(waiting, tokenizer, writer)


def _write_batch(
    documents: list[tuple[str, str]], tokenizer: Tokenizer, writer: DatasetWriter
) -> None:
    encoded = tokenizer.encode_batch([text for _, text in documents])
    for (split, _), ids in zip(documents, encoded, strict=True):
        writer.add(split, ids)
