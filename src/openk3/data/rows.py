"""Rows of T tokens: row i is a pure function of (seed, i).

A split is a circle of N stored tokens in which every document ends with the end-of-text token.
An epoch cuts the circle, from an offset of its own, into ceil(N / T) windows and takes them in an
order of its own. A window's targets are its tokens; its inputs are the tokens one place earlier. So

- every stored token is the target of exactly one row of an epoch: nothing is lost or repeated;
- a document's first token is predicted from the end-of-text token of its predecessor, which is the
  only thing a document sees of another: a new sequence (`Row.starts`) begins with that input;
- documents longer than T, and those that meet a window's edge, are split; edges move every epoch.

Only an epoch's last window can be shorter than T.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from openk3._io import derive_seed
from openk3.data.dataset import Dataset, Split
from openk3.data.permute import Permutation
from openk3.errors import ConfigError, DataError, InputError

IGNORE = -100


class Patches(NamedTuple):
    """Pictures of a row: values [N, 3, P, P] float32 as the model reads them, grids [pictures, 3]
    int64 (frames, rows and columns of patches)."""

    values: np.ndarray
    grids: np.ndarray


@dataclass(frozen=True)
class Row:
    """inputs and targets [n] int64, n <= T (target IGNORE: context only); starts: where in the row,
    beyond 0, a new sequence begins; num_bytes: raw bytes that the targets stand for; patches: the
    pictures at the media ids."""

    inputs: np.ndarray
    targets: np.ndarray
    starts: np.ndarray
    num_bytes: int
    patches: Patches | None = None


class RowSource(Protocol):
    """What a loader needs. `row(i)` must be a pure function of i >= 0."""

    seq_len: int
    dataset: Dataset

    def row(self, index: int) -> Row: ...


class FiniteRows(RowSource, Protocol):
    """Rows to be taken once; from `num_rows` on they are empty."""

    num_rows: int


def _check_lengths(split: Split, seq_len: int) -> None:
    if seq_len < 1:
        raise ConfigError(f"seq_len is {seq_len}; it must be at least 1")
    if split.num_tokens == 0:
        raise DataError(f"split {split.name!r} of {split.dataset.path} holds no tokens")


def _circle(split: Split, start: int, stop: int) -> list[tuple[int, int]]:
    """Cut [start, stop) of the endless circle into ranges of stored positions."""
    size, pieces = split.num_tokens, []
    while start < stop:
        low = start % size
        high = min(low + stop - start, size)
        pieces.append((low, high))
        start += high - low
    return pieces


def _cut(split: Split, start: int, length: int, num_context: int = 0) -> Row:
    """The row whose targets are `length` tokens of the circle from `start`."""
    tokens = np.concatenate([split.read(*p) for p in _circle(split, start - 1, start + length)])
    starts, at = [np.empty(0, np.int64)], 0
    for low, high in _circle(split, start, start + length):
        starts.append(split.document_starts(low, high) - low + at)
        at += high - low
    begins = np.concatenate(starts)
    if (largest := int(tokens.max())) >= split.dataset.vocab_size:
        raise DataError(
            f"{split.dataset.path} is corrupt: split {split.name!r} holds the id {largest} near "
            f"token {start}, beyond its vocabulary of {split.dataset.vocab_size}; find the bad "
            "file with k3 data info"
        )
    num_bytes = int(split.dataset.token_bytes[tokens[1 + num_context :]].sum())
    targets = tokens[1:].copy()
    targets[:num_context] = IGNORE
    return Row(tokens[:-1], targets, begins[begins > 0], num_bytes)


class Windows:
    """Endless shuffled rows of one split. `num_rows` rows make an epoch."""

    def __init__(self, split: Split, seq_len: int, seed: int) -> None:
        _check_lengths(split, seq_len)
        self.split, self.seq_len, self.seed = split, seq_len, seed
        self.dataset = split.dataset
        self.num_rows = -(-split.num_tokens // seq_len)
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    def _draw_epoch(self, epoch: int) -> tuple[Permutation, int]:
        order = Permutation(self.num_rows, derive_seed(self.seed, "windows", epoch))
        return order, derive_seed(self.seed, "offset", epoch) % self.split.num_tokens

    def _target_range(self, index: int) -> tuple[int, int]:
        if index < 0:
            raise InputError(f"row index is {index}; it must not be negative")
        epoch, place = divmod(index, self.num_rows)
        order, offset = self._epoch(epoch)
        first = order(place) * self.seq_len
        return offset + first, min(self.seq_len, self.split.num_tokens - first)

    def row(self, index: int) -> Row:
        """Row `index`; index // num_rows is its epoch."""
        return _cut(self.split, *self._target_range(index))

    def seen(self, num_rows: int) -> list[tuple[int, int]]:
        """Stored positions that rows 0 to num_rows - 1 cover, as rising disjoint ranges.

        Used to train a baseline on exactly the text that a run has seen.
        """
        ranges = []
        for index in range(min(num_rows, self.num_rows)):
            start, length = self._target_range(index)
            ranges += _circle(self.split, start, start + length)
        merged: list[tuple[int, int]] = []
        for low, high in sorted(ranges):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return merged


class InOrder:
    """A split once, front to back, for evaluation: every token is a target exactly once.

    Each row but the first repeats the last `num_context` tokens before it as context (target
    IGNORE), so that no prediction is made from less than that, except at a document's start.
    """

    def __init__(self, split: Split, seq_len: int, num_context: int = 0) -> None:
        _check_lengths(split, seq_len)
        if not 0 <= num_context < seq_len:
            raise ConfigError(f"num_context is {num_context}; allowed: 0 to seq_len - 1")
        self.split, self.seq_len, self.num_context = split, seq_len, num_context
        self.dataset = split.dataset
        fresh = seq_len - num_context
        self.num_rows = 1 + max(0, -(-(split.num_tokens - seq_len) // fresh))

    def row(self, index: int) -> Row:
        """Row `index` of num_rows; later rows are empty."""
        if index < 0:
            raise InputError(f"row index is {index}; it must not be negative")
        start = index * (self.seq_len - self.num_context)
        if index >= self.num_rows:
            start = self.split.num_tokens
        length = min(self.seq_len, self.split.num_tokens - start)
        return _cut(self.split, start, length, self.num_context if index else 0)
