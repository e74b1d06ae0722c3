"""Rows of several datasets, and the rows that training reads."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from openk3._io import derive_seed
from openk3.data.dataset import Split
from openk3.data.permute import Permutation
from openk3.data.pictures import PictureRows, PictureSplit, has_pictures
from openk3.data.rows import Row, RowSource, Windows
from openk3.errors import ConfigError, DataError, InputError


class Mixture:
    """Rows of several sources in fixed proportions.

    Every block of BLOCK rows holds round(weight * BLOCK) rows of each source (largest remainders
    make the sum exact) in an order of its own, so a source's share is exact, not only expected,
    and row i needs no count of the rows before it.
    """

    BLOCK = 10_000

    def __init__(self, sources: Sequence[RowSource], weights: Sequence[float], seed: int) -> None:
        """weights: positive, in any unit. Raises ConfigError or DataError if they do not mix."""
        if not sources or len(sources) != len(weights):
            raise ConfigError(f"a mixture has {len(sources)} sources but {len(weights)} weights")
        self.sources, self.seed = list(sources), seed
        self.seq_len, self.dataset = sources[0].seq_len, sources[0].dataset
        for other in sources[1:]:
            _check_alike(sources[0], other)
        self.shares = _shares(weights, self.BLOCK)
        self._ends = np.cumsum(self.shares)
        self._order = lru_cache(maxsize=2)(
            lambda block: Permutation(self.BLOCK, derive_seed(seed, "mixture", block))
        )

    def row(self, index: int) -> Row:
        """Row `index` of the mixture."""
        if index < 0:
            raise InputError(f"row index is {index}; it must not be negative")
        block, place = divmod(index, self.BLOCK)
        place = self._order(block)(place)
        which = int(np.searchsorted(self._ends, place, side="right"))
        share = self.shares[which]
        within = place - (int(self._ends[which]) - share)
        return self.sources[which].row(block * share + within)


def training_rows(
    splits: Sequence[Split], seq_len: int, seed: int, weights: Sequence[float] = ()
) -> RowSource:
    """Shuffled rows of one split, or of several mixed by `weights` (empty: by their tokens).

    Documents with pictures come whole, text in windows of `seq_len`. Raises ConfigError or
    DataError for splits that do not mix or a picture document that is too long.
    """
    if not splits:
        raise ConfigError("training needs at least one dataset")
    seeds = [seed, *(derive_seed(seed, "source", k) for k in range(1, len(splits)))]
    sources = [_shuffled(split, seq_len, s) for split, s in zip(splits, seeds, strict=True)]
    if len(splits) == 1 and len(weights) < 2:
        return sources[0]
    return Mixture(sources, weights or [split.num_tokens for split in splits], seed)


def _shuffled(split: Split, seq_len: int, seed: int) -> RowSource:
    if has_pictures(split.dataset):
        return PictureRows(PictureSplit(split), seq_len, seed)
    return Windows(split, seq_len, seed)


def _check_alike(first: RowSource, other: RowSource) -> None:
    if first.seq_len != other.seq_len:
        raise ConfigError(f"a mixture's seq_len differ: {first.seq_len} and {other.seq_len}")
    one, two = first.dataset, other.dataset
    same_ids = (one.vocab_size, one.eot_id, one.tokenizer_sha256) == (
        (two.vocab_size, two.eot_id, two.tokenizer_sha256)
    )
    if not same_ids:
        raise DataError(
            f"{one.path} and {two.path} were made with different tokenizers and cannot be mixed; "
            "build both with the same one"
        )


def _shares(weights: Sequence[float], block: int) -> list[int]:
    values = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(values).all() or (values <= 0).any():
        raise ConfigError(f"mixture weights must be positive numbers, got {list(weights)}")
    exact = values / values.sum() * block
    shares = np.floor(exact).astype(int)
    missing = block - int(shares.sum())
    shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
    if (shares == 0).any():
        raise ConfigError(
            f"mixture weights {list(weights)}: each must be at least 1/{block} of their sum"
        )
    return shares.tolist()
