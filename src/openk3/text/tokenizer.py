"""The tokenizer: text to ids and back, with special tokens only where the caller asks for them.

    tokenizer = load("tiktoken.model")            # or tokenizer.json, or a folder with either
    tokenizer.encode("literal <|open|> text")     # never a special token
    tokenizer.encode_segments(xtml.render(...))   # structure with special tokens, text without

BPE itself is the `tokenizers` library, also for rank files (`ranks.py` says why that is exact).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from openk3.errors import InputError, nearest
from openk3.text import special_tokens as special
from openk3.text.pretokenize import split_long, well_formed
from openk3.text.stream import StreamDecoder, lookup_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine


class Tokenizer:
    """Byte-level BPE with a table of special tokens. Made by `load` or `train_tokenizer.train`.

    Attributes:
        special_tokens: name to id of every special token.
        vocab_size: one more than the largest id.
    """

    def __init__(
        self,
        engine: Engine,
        token_bytes: Sequence[bytes | None],
        special_tokens: Mapping[str, int],
        skippable: Iterable[str] | None = None,
    ):
        special.check_table(special_tokens, "special_tokens")
        self._engine = engine
        self.special_tokens = dict(special_tokens)
        self.vocab_size = max(len(token_bytes), 1 + max(special_tokens.values(), default=-1))
        self._token_bytes: list[bytes | None] = list(token_bytes)
        self._token_bytes += [None] * (self.vocab_size - len(token_bytes))
        for name, token_id in special_tokens.items():
            self._token_bytes[token_id] = name.encode()
        names = set(special_tokens) - special.NOT_SKIPPABLE if skippable is None else skippable
        self._skippable = frozenset(special_tokens[name] for name in names)
        self._special_names = {token_id: name for name, token_id in special_tokens.items()}
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @property
    def bos_id(self) -> int:
        """Id of [BOS]."""
        return self.special_id(special.BOS)

    @property
    def eos_id(self) -> int:
        """Id of [EOS], which ends a document."""
        return self.special_id(special.EOS)

    @property
    def pad_id(self) -> int:
        """Id of [PAD]."""
        return self.special_id(special.PAD)

    @property
    def end_of_msg_id(self) -> int:
        """Id of <|end_of_msg|>, at which chat generation stops."""
        return self.special_id(special.END_OF_MSG)

    @property
    def can_chat(self) -> bool:
        """Whether it has the tokens that the chat format is made of."""
        chat = {special.OPEN, special.CLOSE, special.SEP, special.END_OF_MSG}
        return chat <= self.special_tokens.keys()

    def special_id(self, name: str) -> int:
        """Id of a special token. Raises InputError with the nearest name when there is none."""
        if name not in self.special_tokens:
            hint = nearest(name, list(self.special_tokens))
            raise InputError(f"this vocabulary has no special token {name!r}{hint}")
        return self.special_tokens[name]

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is a special token."""
        return self.special_name(token_id) is not None

    def special_name(self, token_id: int) -> str | None:
        """The name of a special token, None for an ordinary one."""
        return self._special_names.get(token_id)

    def knows(self, token_id: int) -> bool:
        """Whether an id has bytes: a model may have more rows than its vocabulary has ids."""
        return 0 <= token_id < self.vocab_size and self._token_bytes[token_id] is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token. Raises InputError for an id outside the vocabulary."""
        return lookup_bytes(self._token_bytes, token_id)

    def first_difference(self, other: Tokenizer) -> int | None:
        """The first id that is other bytes in `other`; ids that only one has do not count."""
        pairs = zip(self._token_bytes, other._token_bytes, strict=False)
        odd = (i for i, (a, b) in enumerate(pairs) if a != b and a is not None and b is not None)
        return next(odd, None)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `text`.

        Args:
            text: any string; lone surrogates become U+FFFD.
            allow_special: read names of special tokens as those tokens. Leave it off for text
                that people or tools wrote, so that it cannot forge structure.
        """
        if not allow_special:
            return self.encode_batch([text])[0]
        ids: list[int] = []
        for piece in _pieces(text):
            start = 0
            for match in self._special_pattern.finditer(piece):
                ids += self._encode_pieces([piece[start : match.start()]])[0]
                ids.append(self.special_tokens[match.group()])
                start = match.end()
            ids += self._encode_pieces([piece[start:]])[0]
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, none of them special; on several cores where the machine has them."""
        pieces_by_text = [_pieces(text) for text in texts]
        encoded = iter(self._encode_pieces([p for pieces in pieces_by_text for p in pieces]))
        return [[i for _ in pieces for i in next(encoded)] for pieces in pieces_by_text]

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of `(text, is_special)` segments, each encoded on its own (as K3's chat format).

        Special tokens are recognised only inside segments marked so; merges never cross a border.
        """
        segments = list(segments)
        ordinary = iter(
            self.encode_batch([text for text, is_special in segments if not is_special])
        )
        ids: list[int] = []
        for text, is_special in segments:
            ids += self.encode(text, allow_special=True) if is_special else next(ordinary)
        return ids

    def _encode_pieces(self, pieces: list[str]) -> list[list[int]]:
        encoded = self._engine.encode_batch_fast(pieces, add_special_tokens=False)
        return [one.ids for one in encoded]

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
        """The exact bytes that `ids` stand for. Raises InputError for an id out of range."""
        skip = self._skippable if skip_special else frozenset()
        return b"".join(lookup_bytes(self._token_bytes, i) for i in ids if i not in skip)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            skip_special: leave special tokens out, except the XTML markers open, close and sep,
                which a parser needs (`special_tokens.NOT_SKIPPABLE`).
        """
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")

    def stream_decoder(self, *, skip_special: bool = False) -> StreamDecoder:
        """A decoder for ids that arrive one by one."""
        return StreamDecoder(self._token_bytes, self._skippable if skip_special else frozenset())

    def save(self, path: str | Path) -> Path:
        """Write `tokenizer.json` and the small `tokenizer_config.json` into the folder `path`.

        Each file appears whole or not at all. Returns the path of `tokenizer.json`.
        """
        from openk3.text.tokenizer_files import save

        return save(self._engine, self.special_tokens, self._skippable, Path(path))


def _pieces(text: str) -> list[str]:
    if not isinstance(text, str):
        raise InputError(f"text to encode must be a str, not {type(text).__name__}")
    return list(split_long(well_formed(text)))


def load(path: str | Path, *, special_tokens: Mapping[str, int] | None = None) -> Tokenizer:
    """Open a tokenizer: a tiktoken rank file, a `tokenizer.json`, or a folder that holds either.

    Args:
        path: the file or folder. In a folder `tokenizer.json` wins over `tiktoken.model`.
        special_tokens: name to id, replacing what the files say. By default a `tokenizer.json`
            brings its own, and a rank file takes those of a `tokenizer_config.json` beside it or
            else K3's table.

    Raises:
        DataError: no such file, a corrupt file, a rank file of another vocabulary whose special
            tokens nobody gave, or a tokenizer that is not byte-level BPE.
    """
    from openk3.text.tokenizer_files import load_any

    engine, token_bytes, table, skippable = load_any(Path(path), special_tokens)
    return Tokenizer(engine, token_bytes, table, skippable)
