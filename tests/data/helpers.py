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


def write_files(root: Path, files: dict[str, bytes]) -> Path:
    """Files by relative path under `root`."""
    for name, raw in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    return root


def source_files(count: int) -> dict[str, bytes]:
    """Small, different Python files."""
    body = 'def value_{0}(self):\n    """Return value {0}."""\n    return self.values[{0}]\n'
    return {f"m{i}.py": (body.format(i) * 5).encode() for i in range(count)}
