"""Model output to markers and text, from token ids or from text, in pieces of any size."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import NamedTuple

from openk3.errors import InputError
from openk3.text.special_tokens import CLOSE, END_OF_MSG, OPEN, SEP
from openk3.text.tokenizer import Tokenizer

MARKERS = (OPEN, CLOSE, SEP, END_OF_MSG)
_ANY_MARKER = re.compile("|".join(map(re.escape, MARKERS)))


class Item(NamedTuple):
    """A marker, or a piece of text between markers."""

    text: str
    is_marker: bool


class Lexer:
    """Splits pieces into items.

    In ids, a marker is the special token and nothing else, so text that merely spells a marker
    stays text. In text (`str`, or UTF-8 `bytes` cut anywhere), the spelling is all there is. A
    piece that may still become a marker or a whole character is held back.

    Args:
        tokenizer: needed to feed ids.
    """

    def __init__(self, tokenizer: Tokenizer | None = None):
        self._tokenizer = tokenizer
        self._id_decoder = tokenizer.stream_decoder() if tokenizer else None
        self._byte_decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, piece: int | Sequence[int] | str | bytes) -> Iterator[Item]:
        """Items that `piece` completes.

        Raises InputError for ids without a tokenizer or outside its vocabulary.
        """
        if isinstance(piece, str):
            yield from self._text(self._byte_decoder.decode(b"") + piece)
        elif isinstance(piece, (bytes, bytearray)):
            yield from self._text(self._byte_decoder.decode(bytes(piece)))
        else:
            for token_id in [piece] if isinstance(piece, (int, Integral)) else piece:
                yield from self._id(int(token_id))

    def finish(self) -> Iterator[Item]:
        """What was held back, as text."""
        rest = self._held + self._byte_decoder.decode(b"", final=True)
        self._held = ""
        if self._id_decoder:
            rest += self._id_decoder.finish()
        yield from _text_item(rest)

    def _id(self, token_id: int) -> Iterator[Item]:
        if self._tokenizer is None or self._id_decoder is None:
            raise InputError("feeding token ids needs StreamParser(tokenizer)")
        name = self._tokenizer.special_name(token_id)
        if name in MARKERS:
            yield from _text_item(self._id_decoder.finish())
            yield Item(name, True)
        else:
            yield from _text_item(self._id_decoder.feed(token_id))

    def _text(self, piece: str) -> Iterator[Item]:
        buffer = self._held + piece
        start = 0
        for match in _ANY_MARKER.finditer(buffer):
            yield from _text_item(buffer[start : match.start()])
            yield Item(match.group(), True)
            start = match.end()
        cut = _held_from(buffer, start)
        self._held = buffer[cut:]
        yield from _text_item(buffer[start:cut])


def _held_from(buffer: str, start: int) -> int:
    """Where the tail begins that may be the first part of a marker."""
    tail = buffer.rfind("<", start)
    if tail >= 0 and any(marker.startswith(buffer[tail:]) for marker in MARKERS):
        return tail
    return len(buffer)


def _text_item(text: str) -> Iterator[Item]:
    if text:
        yield Item(text, False)
