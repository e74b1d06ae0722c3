"""What a language model must beat: byte n-grams trained on the same text, and xz per document.

`ByteNgram` is interpolated modified Kneser-Ney (Chen and Goodman 1999, section 3) over bytes. For a
context c of k bytes, its shortening c' (the farthest byte dropped) and the next byte w

    p_k(w | c) = (n(c w) - D(n(c w))) / n(c) + mass(c) p_{k-1}(w | c'),
    mass(c) = sum over w of D(n(c w)) / n(c),

and p_k(w | c) = p_{k-1}(w | c') where c was never seen. n counts occurrences at the longest
context and distinct preceding bytes below it; D(1), D(2), D(3 or more) follow from the counts of
counts, for each length; below the empty context stands the uniform 1/256. So the 256 probabilities
sum to 1 and none is 0: -log2 p is a code length, comparable with a model's bits per byte. The end
of a document is not predicted; a document's first bytes see zero bytes before it.
"""

import lzma
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from openk3.data.dataset import Split
from openk3.errors import DataError, InputError
from openk3.text.tokenizer import Tokenizer

MAX_CONTEXT = 7
_BYTE = np.uint64(8)


@dataclass(frozen=True)
class _Level:
    """One context length. Keys are big-endian bytes in a uint64, rising."""

    grams: np.ndarray  # [G] uint64: context and next byte
    discounted: np.ndarray  # [G] float64: (n - D(n)) / n(c)
    contexts: np.ndarray  # [C] uint64
    mass: np.ndarray  # [C] float64


class ByteNgram:
    """A byte model with contexts of up to `context` bytes, trained on `documents`.

    10 MB of source code take a few seconds and well under 1 GB. Raises DataError when there is
    no byte to learn from.
    """

    def __init__(self, documents: Iterable[bytes], context: int) -> None:
        if not 0 <= context <= MAX_CONTEXT:
            raise InputError(f"context is {context} bytes; allowed: 0 to {MAX_CONTEXT}")
        self.context = context
        keys = _keys(documents, context)
        if keys.size == 0:
            raise DataError("an n-gram model needs text to learn from; the documents are empty")
        grams, counts = np.unique(keys, return_counts=True)
        levels = [_level(grams, counts)]
        for length in range(context - 1, -1, -1):
            grams, counts = np.unique(_suffix(grams, length + 1), return_counts=True)
            levels.append(_level(grams, counts))
        self._levels = levels[::-1]

    def probabilities(self, keys: np.ndarray) -> np.ndarray:
        """[n] float64 for n keys: uint64 of the `context` bytes before and then the byte itself."""
        p = np.full(keys.shape, 1 / 256)
        for length, level in enumerate(self._levels):
            gram = _suffix(keys, length + 1)
            p *= _look_up(level.contexts, level.mass, gram >> _BYTE, default=1.0)
            p += _look_up(level.grams, level.discounted, gram, default=0.0)
        return p

    def distribution(self, before: bytes) -> np.ndarray:
        """[256] float64: probability of each next byte after `before`; sums to 1."""
        tail = (bytes(self.context) + before)[-self.context :] if self.context else b""
        base = np.uint64(int.from_bytes(tail, "big")) << _BYTE
        return self.probabilities(base | np.arange(256, dtype=np.uint64))

    def bits(self, document: bytes) -> np.ndarray:
        """[len(document)] float64: bits to code each byte, given those before it."""
        return -np.log2(self.probabilities(_keys([document], self.context)))

    def bits_per_byte(self, documents: Iterable[bytes]) -> float:
        """Mean over all bytes of all documents."""
        keys = _keys(documents, self.context)
        if keys.size == 0:
            raise DataError("bits per byte need text; the documents are empty")
        return float(-np.log2(self.probabilities(keys)).mean())


def _keys(documents: Iterable[bytes], context: int) -> np.ndarray:
    """[total bytes] uint64: each byte with the `context` bytes before it, in order."""
    padding, pieces, real = bytes(context), [], []
    for document in documents:
        pieces += [padding, document]
        real += [np.zeros(context, bool), np.ones(len(document), bool)]
    stream = np.frombuffer(b"".join(pieces), np.uint8)
    if stream.size <= context:
        return np.empty(0, np.uint64)
    size = stream.size - context
    keys = np.zeros(size, np.uint64)
    for lag in range(context, -1, -1):
        keys <<= _BYTE
        keys |= stream[context - lag : context - lag + size]
    return keys[np.concatenate(real)[context:]]


def _suffix(keys: np.ndarray, num_bytes: int) -> np.ndarray:
    return keys & np.uint64((1 << 8 * num_bytes) - 1)


def _level(grams: np.ndarray, counts: np.ndarray) -> _Level:
    owner = grams >> _BYTE
    first = np.flatnonzero(np.concatenate([[True], owner[1:] != owner[:-1]]))
    total = np.add.reduceat(counts, first).astype(np.float64)
    discount = _discounts(counts)[np.minimum(counts, 3)]
    spread = np.repeat(total, np.diff(np.append(first, len(grams))))
    mass = np.add.reduceat(discount, first) / total
    return _Level(grams, (counts - discount) / spread, owner[first], mass)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """[4] float64: D of a count of 0, 1, 2, and 3 or more (Chen and Goodman 1999, eq. 26)."""
    n = [float((counts == c).sum()) for c in range(5)]
    flat = np.array([0.0, 0.5, 0.5, 0.5])
    if min(n[1:]) == 0:  # too little text for the estimate
        return flat
    y = n[1] / (n[1] + 2 * n[2])
    estimate = [c - (c + 1) * y * n[c + 1] / n[c] for c in (1, 2, 3)]
    # odd counts of counts can ask for D < 0 or D > n, which would not be a probability
    return np.array([0.0, *np.clip(estimate, 0.05, [0.95, 1.95, 2.95])])


def _look_up(
    keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, default: float
) -> np.ndarray:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], default)


def xz_bits_per_byte(documents: Iterable[bytes]) -> float:
    """`xz -9e` of each document by itself: total compressed bits over total bytes.

    Container overhead (about 60 bytes a document) is included, as on the command line.
    """
    packed = total = 0
    for document in documents:
        # The dictionary never needs to exceed the input; 64 MiB would only cost memory.
        size = min(max(len(document), 4096), 64 << 20)
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": size}]
        packed += len(lzma.compress(document, check=lzma.CHECK_CRC64, filters=filters))
        total += len(document)
    if total == 0:
        raise DataError("bits per byte need text; the documents are empty")
    return 8 * packed / total


def texts(
    split: Split, tokenizer: Tokenizer, ranges: Sequence[tuple[int, int]] | None = None
) -> list[bytes]:
    """The raw bytes of a split's documents, or of the stored positions `ranges` of them.

    With `ranges = windows.seen(n)` this is exactly the text that n rows of training have shown.
    """
    eot = split.dataset.eot_id
    pieces = []
    for low, high in [(0, split.num_tokens)] if ranges is None else ranges:
        ids = split.read(low, high)
        for piece in np.split(ids, np.flatnonzero(ids == eot) + 1):
            piece = piece[piece != eot]
            if piece.size:
                pieces.append(tokenizer.decode_bytes(piece.tolist()))
    return pieces


def bits_per_byte(
    train: Sequence[bytes], held_out: Sequence[bytes], contexts: Sequence[int] = (3, 5)
) -> dict[str, float]:
    """Held-out bits per byte by name: "3-byte context", "5-byte context", "xz -9e".

    train: the unique text that the model to be compared has seen; held_out: whole documents.
    """
    figures = {
        f"{context}-byte context": ByteNgram(train, context).bits_per_byte(held_out)
        for context in contexts
    }
    return {**figures, "xz -9e": xz_bits_per_byte(held_out)}
