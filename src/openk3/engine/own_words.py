"""A model's own words, kept as the tokens that it chose.

A text that a model wrote, turned into tokens again, need not become the tokens that it was made of.
The next turn of a conversation would then begin with others than those that are remembered, and all
of the answer would be computed anew.
"""

from collections.abc import Sequence
from itertools import accumulate

from openk3.text.tokenizer import Tokenizer

SPECIAL = 0x10000
"""Bytes are written as the characters below 256, special tokens as those from here on."""


class OwnWords:
    """Conversations that were had, to be found where another prompt begins with one of them."""

    def __init__(self, conversations: Sequence[Sequence[int]], tokenizer: Tokenizer) -> None:
        """conversations: ids of prompts with the answers to them."""
        self._tokenizer = tokenizer
        self._known = [("".join(map(self._spelled, ids)), ids) for ids in conversations]

    def restore(self, ids: Sequence[int]) -> tuple[int, ...]:
        """A prompt of the same text, with a conversation's own tokens where it begins with it."""
        pieces = [self._spelled(token_id) for token_id in ids] if self._known else []
        text, ends = "".join(pieces), list(accumulate(map(len, pieces)))
        for known, own in self._known:
            if text.startswith(known) and len(known) in ends:
                return (*own, *ids[ends.index(len(known)) + 1 :])
        return tuple(ids)

    def _spelled(self, token_id: int) -> str:
        ordinary = self._tokenizer.knows(token_id)
        if not ordinary or self._tokenizer.is_special(token_id):
            return chr(SPECIAL + token_id)
        return self._tokenizer.token_bytes(token_id).decode("latin-1")
