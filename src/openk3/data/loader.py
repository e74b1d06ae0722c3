"""Batches of packed rows. The whole state of a loader is one integer: how many rows all ranks took.

Rank r of R takes rows i * R + r, so the same rows make up a step for any R that divides it.

Shape legend: B rows of a batch, T tokens of a row, N packed sequences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from openk3.data.rows import IGNORE, FiniteRows, Row, RowSource
from openk3.errors import ConfigError


@dataclass(frozen=True)
class Batch:
    """B rows of T tokens.

    input_ids   [B, T] int64
    targets     [B, T] int64: the token that follows each input, IGNORE (-100) where none is wanted
    cu_seqlens  [N + 1] int32: where sequences begin in the flattened batch, from 0 to B * T. A row
                begins a sequence, so does a document, so does a row's padding.
    num_tokens  targets that are not IGNORE
    num_bytes   raw text bytes that those targets stand for (an end-of-text token stands for none):
                summed loss / ln 2 / num_bytes is bits per byte
    whole_rows  whether every row is one sequence, padding aside: then rows need no packing
    valid       [B, T] bool: False is padding; None when there is none
    pixel_values [N, 3, P, P] float32 and grid_thws [pictures, 3] int64: what stands at the media
                ids, in order; None without pictures
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor
    num_tokens: int
    num_bytes: int
    whole_rows: bool = False
    valid: torch.Tensor | None = None
    pixel_values: torch.Tensor | None = None
    grid_thws: torch.Tensor | None = None

    @property
    def num_positions(self) -> int:
        """Positions that are not padding."""
        return self.input_ids.numel() if self.valid is None else int(self.valid.sum())

    def packed(self) -> "Batch":
        """The same batch as one row [1, B * T], which is how a model takes `cu_seqlens`."""
        flat = ("input_ids", "targets", "valid")
        return replace(self, **{n: t.reshape(1, -1) for n, t in self._tensors() if n in flat})

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on `device`."""
        return replace(self, **{n: t.to(device) for n, t in self._tensors()})

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(n, t) for n, t in vars(self).items() if isinstance(t, torch.Tensor)]


def collate(rows: Sequence[Row], seq_len: int, pad_id: int) -> Batch:
    """Pack rows of at most `seq_len` tokens; shorter ones are padded: `pad_id`, target IGNORE."""
    inputs = np.full((len(rows), seq_len), pad_id, dtype=np.int64)
    targets = np.full((len(rows), seq_len), IGNORE, dtype=np.int64)
    begins = [np.empty(0, np.int64)]
    for b, row in enumerate(rows):
        n = len(row.inputs)
        inputs[b, :n], targets[b, :n] = row.inputs, row.targets
        padding = np.arange(n, n + (0 < n < seq_len))
        begins.append(b * seq_len + np.concatenate([[0], row.starts, padding]))
    cu_seqlens = np.append(np.concatenate(begins), len(rows) * seq_len).astype(np.int32)
    lengths = np.array([len(row.inputs) for row in rows])
    valid = np.arange(seq_len) < lengths[:, None]
    patches = [row.patches for row in rows if row.patches is not None]
    return Batch(
        input_ids=torch.from_numpy(inputs),
        targets=torch.from_numpy(targets),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        num_tokens=int((targets != IGNORE).sum()),
        num_bytes=sum(row.num_bytes for row in rows),
        whole_rows=not any(len(row.starts) for row in rows),
        valid=None if valid.all() else torch.from_numpy(valid),
        pixel_values=_joined([p.values for p in patches]),
        grid_thws=_joined([p.grids for p in patches]),
    )


def _joined(arrays: list[np.ndarray]) -> torch.Tensor | None:
    """All arrays one after another; None when they hold nothing."""
    if not any(map(len, arrays)):
        return None
    return torch.from_numpy(np.concatenate(arrays))


class Loader:
    """Endless iterator of a rank's batches, `batch_rows` rows each.

    `position` counts the rows that all ranks together have taken. Save it; give it back to resume.
    Every `next` advances it by batch_rows * world_size on every rank.
    """

    def __init__(
        self,
        source: RowSource,
        batch_rows: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        position: int = 0,
    ) -> None:
        if batch_rows < 1:
            raise ConfigError(f"batch_rows is {batch_rows}; it must be at least 1")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is outside a world of {world_size}")
        if position < 0:
            raise ConfigError(f"position is {position}; it must not be negative")
        self.source, self.batch_rows = source, batch_rows
        self.rank, self.world_size, self.position = rank, world_size, position

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        first, step = self.position + self.rank, self.world_size
        rows = [self.source.row(first + j * step) for j in range(self.batch_rows)]
        self.position += self.batch_rows * step
        return collate(rows, self.source.seq_len, self.source.dataset.eot_id)


def batches_in_order(
    rows: FiniteRows, batch_rows: int, *, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """A rank's share of finite rows, in order, each row on one rank.

    All ranks get equally many batches of `batch_rows` rows (the last ones may be all padding), so
    collectives stay in step.
    """
    loader = Loader(rows, batch_rows, rank=rank, world_size=world_size)
    while loader.position < rows.num_rows:
        yield next(loader)
