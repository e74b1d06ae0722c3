"""Incremental decoding: text comes out as soon as it is whole, never half a character."""

import codecs
from collections.abc import Sequence

from openk3.errors import InputError


def lookup_bytes(token_bytes: Sequence[bytes | None], token_id: int) -> bytes:
    """The bytes of `token_id`. Raises InputError for an id outside the vocabulary."""
    known = token_bytes[token_id] if 0 <= token_id < len(token_bytes) else None
    if known is None:
        raise InputError(f"token id {token_id} is not in the vocabulary of {len(token_bytes)} ids")
    return known


class StreamDecoder:
    """Turns token ids into text piece by piece.

    The pieces, with `finish()` last, join to what `Tokenizer.decode` gives for all ids at once.

    Args:
        token_bytes: bytes of each id; None where the vocabulary has a hole.
        skip: ids that produce nothing.
    """

    def __init__(self, token_bytes: Sequence[bytes | None], skip: frozenset[int] = frozenset()):
        self._token_bytes = token_bytes
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is still open.

        Raises InputError for an id outside the vocabulary.
        """
        if token_id in self._skip:
            return ""
        return self._decoder.decode(lookup_bytes(self._token_bytes, token_id))

    def finish(self) -> str:
        """U+FFFD if the ids ended inside a character, else nothing. The decoder starts afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
