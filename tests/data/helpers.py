"""Small datasets whose every stored token is a different id, so that each can be followed."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from openk3.data.dataset import Dataset
from openk3.data.writer import write_dataset

EOT = 0


def make_dataset(
    path: Path, lengths: Sequence[int], *, max_shard_tokens: int = 1 << 20, split: str = "train"
) -> Dataset:
    """Documents of the given lengths with ids 1, 2, 3, ...; id i stands for 1 + i % 3 bytes."""
    vocab_size = sum(lengths) + 1
    token_bytes = 1 + np.arange(vocab_size) % 3
    token_bytes[EOT] = 0
    ids = itertools.count(1)
    with write_dataset(
        path, token_bytes=token_bytes, eot_id=EOT, max_shard_tokens=max_shard_tokens
    ) as writer:
        for length in lengths:
            writer.add(split, list(itertools.islice(ids, length)))
    return Dataset(path)
