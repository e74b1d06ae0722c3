"""Byte-level BPE: how `tokenizers` writes raw bytes as printable characters."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from openk3.errors import DataError
from openk3.text.special_tokens import MAX_ID

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine


def byte_alphabet() -> list[str]:
    """The printable stand-in for each byte 0..255 in byte-level BPE vocabularies.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 upward.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def vocab_bytes(
    vocab: Mapping[str, int], special_names: Container[str], source: str
) -> list[bytes | None]:
    """The bytes of each id, None for holes. Raises DataError for an entry that is not bytes."""
    largest = max(vocab.values(), default=-1)
    if largest >= MAX_ID:
        raise DataError(f"{source}: id {largest} is not one of a vocabulary (below {MAX_ID})")
    to_latin1 = _ByteOf({ord(char): byte for byte, char in enumerate(byte_alphabet())})
    table: list[bytes | None] = [None] * (1 + largest)
    for name, token_id in vocab.items():
        try:
            if token_id < 0:
                raise ValueError("negative id")
            is_special = name in special_names
            written = name.encode() if is_special else name.translate(to_latin1).encode("latin-1")
        except ValueError:
            raise DataError(
                f"{source}: {name!r} with id {token_id} is not a byte-level token"
            ) from None
        table[token_id] = written
    return table


class _ByteOf(dict[int, int]):
    """Code point to byte; what stands for no byte becomes U+0100, which Latin-1 refuses."""

    def __missing__(self, _: int) -> int:
        return 0x100


def set_byte_level(engine: Engine, pattern: str) -> None:
    """Give `engine` the pre-tokeniser `pattern` over bytes, and the decoder that undoes it."""
    from tokenizers import Regex, decoders, pre_tokenizers

    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
