"""Train a small tokenizer with K3's pre-tokeniser and K3's special tokens at the top of the ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from openk3.errors import DataError, InputError
from openk3.text import special_tokens as special
from openk3.text.byte_level import byte_alphabet, set_byte_level, vocab_bytes
from openk3.text.pretokenize import K3_PATTERN, split_long, well_formed
from openk3.text.tokenizer import Tokenizer


def train(
    texts: Iterable[str],
    vocab_size: int,
    *,
    special_tokens: Sequence[str] = special.K3_NAMES,
    path: str | Path | None = None,
) -> Tokenizer:
    """Byte-level BPE learned from `texts`; the same texts give the same tokenizer, byte for byte.

    Ids are 256 bytes and merges first, `special_tokens` last. When the texts are too few for
    `vocab_size`, the ids between are reserved special tokens, as in K3.

    Args:
        texts: documents, read once.
        vocab_size: number of ids in all; at least 256 plus the special tokens.
        special_tokens: names in id order; the last one gets id `vocab_size - 1`.
        path: folder to save `tokenizer.json` and `tokenizer_config.json` in.

    Raises:
        InputError: `vocab_size` too small, or a repeated or empty special token.
        DataError: the texts hold no character.
    """
    from tokenizers import Tokenizer as Engine
    from tokenizers import models, trainers

    num_ordinary = vocab_size - len(special_tokens)
    if num_ordinary < 256:
        raise InputError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(special_tokens)} special "
            f"tokens need at least {256 + len(special_tokens)}"
        )
    if len(set(special_tokens)) != len(special_tokens) or "" in special_tokens:
        raise InputError(f"special_tokens must be distinct names, got {list(special_tokens)}")
    engine = Engine(models.BPE())
    set_byte_level(engine, K3_PATTERN)
    trainer = trainers.BpeTrainer(
        vocab_size=num_ordinary, initial_alphabet=byte_alphabet(), show_progress=False
    )
    counter = _CountChars(texts)
    engine.train_from_iterator(counter, trainer)
    if counter.num_chars == 0:
        raise DataError("cannot train a tokenizer: the texts hold no character")
    table = special.compact_table(special_tokens, engine.get_vocab_size(), vocab_size)
    token_bytes = vocab_bytes(engine.get_vocab(), (), "trained vocabulary")
    tokenizer = Tokenizer(engine, token_bytes, table)
    if path is not None:
        tokenizer.save(path)
    return tokenizer


class _CountChars:
    """Iterates over the pieces of the texts and counts what went by."""

    def __init__(self, texts: Iterable[str]):
        self._texts = texts
        self.num_chars = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.num_chars += len(text)
            yield from split_long(well_formed(text))
