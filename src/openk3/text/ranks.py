"""Tiktoken rank files: read, check, and turn into a `tokenizers` BPE that encodes identically.

A rank file lists `base64(token bytes) rank` per line. Tiktoken repeatedly joins the neighbouring
pair whose concatenation has the lowest rank, leftmost first. `tokenizers` wants explicit merges
(left, right) in order of priority. Every split of a token into two known tokens is listed, in rank
order; this is exact, not approximate: when two neighbours x, y inside a longer text could join into
t = xy, no merge has crossed the ends of t so far, so the merges inside t were those that BPE makes
of t alone. That sequence has one last two-piece state, hence at most one split of t ever occurs and
the order among the splits of t never matters. A whole pre-token found in the vocabulary is taken as
it is by both (`ignore_merges`).
"""

from __future__ import annotations

import binascii
from pathlib import Path
from typing import TYPE_CHECKING

from openk3.errors import DataError
from openk3.text.byte_level import byte_alphabet, set_byte_level
from openk3.text.pretokenize import K3_PATTERN

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine


def read_ranks(path: str | Path) -> list[bytes]:
    """Token bytes by id. Raises DataError naming file and line when the file is not a rank file."""
    path = Path(path)
    fields = path.read_bytes().split()
    try:
        tokens = [binascii.a2b_base64(field, strict_mode=True) for field in fields[0::2]]
        ids = [int(field) for field in fields[1::2]]
    except (binascii.Error, ValueError):
        raise _first_bad_line(path) from None
    if ids != list(range(len(tokens))) or b"" in tokens:
        raise _first_bad_line(path)
    if len(set(tokens)) != len(tokens):
        repeated = next(token for i, token in enumerate(tokens) if tokens.index(token) != i)
        raise DataError(f"{path}: token {repeated!r} has two ranks")
    missing = {bytes([byte]) for byte in range(256)} - set(tokens)
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of the 256 single bytes have no rank (first: "
            f"{min(missing)!r}), so not every text could be encoded; the file is truncated or not "
            "a byte-level vocabulary"
        )
    return tokens


def _first_bad_line(path: Path) -> DataError:
    """The error for the first line that is not `base64 rank` with ranks counting from 0."""
    expected = 0
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        fields = line.split()
        if not fields:
            continue
        wrong = _why_bad(fields, expected)
        if wrong:
            shown = line[:60].decode("latin-1")
            return DataError(f"{path} line {number}: {wrong}; found {shown!r}")
        expected += 1
    return DataError(f"{path}: tokens and ranks do not pair up line by line")


def _why_bad(fields: list[bytes], expected: int) -> str:
    if len(fields) != 2:
        return "expected a base64 token and a rank (a tiktoken rank file)"
    try:
        token = binascii.a2b_base64(fields[0], strict_mode=True)
    except binascii.Error:
        return "the token is not base64"
    if not token:
        return "the token is empty"
    if not fields[1].isdigit() or int(fields[1]) != expected:
        return f"expected rank {expected}, ranks count up from 0 without gaps"
    return ""


def bpe_engine(tokens: list[bytes], pattern: str = K3_PATTERN) -> Engine:
    """A `tokenizers.Tokenizer` without special tokens that encodes as tiktoken with these ranks."""
    from tokenizers import Tokenizer, models

    stand_in = dict(enumerate(byte_alphabet()))
    names = [token.decode("latin-1").translate(stand_in) for token in tokens]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    engine = Tokenizer(models.BPE(vocab, _merges(names, vocab), ignore_merges=True))
    set_byte_level(engine, pattern)
    return engine


def _merges(names: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    return [
        (left, right)
        for name in names
        for cut in range(1, len(name))
        if (left := name[:cut]) in vocab and (right := name[cut:]) in vocab
    ]
