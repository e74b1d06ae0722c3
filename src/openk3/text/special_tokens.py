"""Special tokens: K3's table, which occupies the top 256 slots of its vocabulary.

`SKIPPABLE` tokens vanish when text is decoded with `skip_special`; the XTML markers open, close
and sep are in K3 not flagged special, so that a parser still sees them.
"""

from collections.abc import Mapping, Sequence

from openk3.errors import InputError

BOS, EOS, PAD, UNK = "[BOS]", "[EOS]", "[PAD]", "[UNK]"
END_OF_MSG, OPEN, CLOSE, SEP = "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"
MEDIA_BEGIN, MEDIA_CONTENT = "<|media_begin|>", "<|media_content|>"
MEDIA_END, MEDIA_PAD = "<|media_end|>", "<|media_pad|>"

K3_NUM_RANKS = 163_584
K3_NUM_SLOTS = 256
_K3_OFFSETS = {
    BOS: 0,
    EOS: 1,
    END_OF_MSG: 2,
    OPEN: 3,
    CLOSE: 4,
    SEP: 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    MEDIA_BEGIN: 18,
    MEDIA_CONTENT: 19,
    MEDIA_END: 20,
    MEDIA_PAD: 21,
    "<osagent_mode>": 65,
    UNK: 254,
    PAD: 255,
}
K3_NAMES: tuple[str, ...] = tuple(_K3_OFFSETS)
"""The sixteen named special tokens of K3, in id order; what a trained vocabulary carries."""

MAX_ID = 1 << 24
"""Ids from here on are taken for damage: a table of bytes is as long as the largest id."""

NOT_SKIPPABLE = frozenset({OPEN, CLOSE, SEP})


def reserved_name(token_id: int) -> str:
    """The name of an unnamed special slot."""
    return f"<|reserved_token_{token_id}|>"


def k3_table(base: int = K3_NUM_RANKS) -> dict[str, int]:
    """Name to id of all 256 special slots that follow `base` ordinary tokens."""
    names = {offset: name for name, offset in _K3_OFFSETS.items()}
    ids = range(base, base + K3_NUM_SLOTS)
    return {names.get(token_id - base, reserved_name(token_id)): token_id for token_id in ids}


def compact_table(names: Sequence[str], num_tokens: int, vocab_size: int) -> dict[str, int]:
    """Name to id with `names` at the very top of a vocabulary of `vocab_size`.

    Slots between the `num_tokens` ordinary tokens and the names get reserved names, as in K3.
    """
    first = vocab_size - len(names)
    table = {reserved_name(token_id): token_id for token_id in range(num_tokens, first)}
    return table | {name: first + i for i, name in enumerate(names)}


def check_table(table: Mapping[str, int], source: str) -> None:
    """Raise InputError unless names are non-empty text and ids are distinct."""
    seen: dict[int, str] = {}
    for name, token_id in table.items():
        if not name or not 0 <= token_id < MAX_ID:
            raise InputError(
                f"{source}: special token {name!r} with id {token_id} needs a name and an id "
                f"within [0, {MAX_ID})"
            )
        if token_id in seen:
            raise InputError(
                f"{source}: special tokens {seen[token_id]!r} and {name!r} share the id {token_id}"
            )
        seen[token_id] = name
