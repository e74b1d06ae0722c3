"""Tokenizer files in and out: `tokenizer.json`, tiktoken ranks, and `tokenizer_config.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from openk3._io import atomic_file, read_json, write_json
from openk3.errors import DataError
from openk3.text import special_tokens as special
from openk3.text.byte_level import byte_alphabet, vocab_bytes
from openk3.text.ranks import bpe_engine, read_ranks

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

SCHEMA = 1
"""Version of what `save` writes, kept as `openk3_schema` in tokenizer_config.json."""

JSON_NAME, CONFIG_NAME, RANKS_NAME = "tokenizer.json", "tokenizer_config.json", "tiktoken.model"


class Parts(NamedTuple):
    """What a tokenizer is made of."""

    engine: Engine
    token_bytes: list[bytes | None]
    special_tokens: Mapping[str, int]
    skippable: Iterable[str] | None


def load_any(path: Path, table: Mapping[str, int] | None) -> Parts:
    """Read a file or folder; see `tokenizer.load`."""
    path = _find(path)
    config = _read_config(path.with_name(CONFIG_NAME))
    if path.suffix == ".json":
        return _load_json(path, table)
    return _load_ranks(path, table, config)


def _find(path: Path) -> Path:
    if not path.is_dir():
        if not path.is_file():
            raise DataError(f"{path}: no such tokenizer file")
        return path
    for name in (JSON_NAME, RANKS_NAME):
        if (path / name).is_file():
            return path / name
    raise DataError(f"{path}: holds neither {JSON_NAME} nor {RANKS_NAME}")


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path, DataError) if path.is_file() else {}
    schema = config.get("openk3_schema", SCHEMA)
    if schema != SCHEMA:
        raise DataError(f"{path}: openk3_schema is {schema}, this version reads {SCHEMA}")
    return config


def _load_ranks(path: Path, table: Mapping[str, int] | None, config: dict[str, Any]) -> Parts:
    tokens = read_ranks(path)
    skippable = None
    if table is None and "added_tokens_decoder" in config:
        added = _added_by_id(config["added_tokens_decoder"], path.with_name(CONFIG_NAME))
        table, skippable = _slots(added, len(tokens))
    elif table is None and len(tokens) == special.K3_NUM_RANKS:
        table = special.k3_table()
    elif table is None:
        raise DataError(
            f"{path}: {len(tokens)} ranks, K3's vocabulary has {special.K3_NUM_RANKS}: a rank file "
            f"of another vocabulary. Put its {CONFIG_NAME} (added_tokens_decoder) beside it, or "
            "pass special_tokens={name: id}"
        )
    clash = [name for name, token_id in table.items() if token_id < len(tokens)]
    if clash:
        raise DataError(
            f"{path}: special token {clash[0]!r} has id {table[clash[0]]}, which is an ordinary "
            f"token; special ids start at {len(tokens)}: the table is of another vocabulary"
        )
    return Parts(bpe_engine(tokens), list(tokens), table, skippable)


def _added_by_id(decoder: Any, path: Path) -> dict[int, tuple[str, bool]]:
    try:
        added = {
            int(token_id): (str(entry["content"]), bool(entry.get("special", True)))
            for token_id, entry in decoder.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: added_tokens_decoder must map ids to objects with content ({error!r})"
        ) from None
    for token_id, (name, _) in added.items():
        _require_id(token_id, name, path)
    return added


def _require_id(token_id: Any, name: str, path: Path) -> None:
    if type(token_id) is not int or not 0 <= token_id < special.MAX_ID:
        raise DataError(
            f"{path}: token {name!r} has id {token_id!r}; expected an integer from 0 to "
            f"{special.MAX_ID - 1}"
        )


def _slots(
    added: dict[int, tuple[str, bool]], num_ranks: int
) -> tuple[dict[str, int], frozenset[str]]:
    """K3's layout: 256 slots after the ranks, unnamed ones reserved."""
    end = max(num_ranks + special.K3_NUM_SLOTS, 1 + max(added, default=-1))
    named = {i: added.get(i, (special.reserved_name(i), True)) for i in range(num_ranks, end)}
    named |= added
    table = {name: token_id for token_id, (name, _) in named.items()}
    return table, frozenset(name for name, skippable in named.values() if skippable)


def _load_json(path: Path, table: Mapping[str, int] | None) -> Parts:
    data = read_json(path, DataError)
    added = _check_json(data, path)
    vocab: dict[str, int] = data["model"]["vocab"]
    names = {token["content"]: token["id"] for token in added}
    skippable = None
    if table is None:
        table = names
        skippable = frozenset(token["content"] for token in added if token.get("special", True))
    token_bytes = vocab_bytes(vocab, names, str(path))
    # Added tokens would be recognised in any text, and truncation would drop some of it.
    data |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return Parts(_engine_from_json(data, path), token_bytes, table, skippable)


def _check_json(data: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """Refuse what is not a byte-level BPE `tokenizer.json`; return its added tokens."""
    model = data.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise DataError(f"{path}: no model.vocab object; not a tokenizer.json with a vocabulary")
    if not all(isinstance(token_id, int) for token_id in model["vocab"].values()):
        raise DataError(f"{path}: model.vocab must map tokens to integer ids")
    kind = model.get("type", "BPE")
    missing = [byte for byte, char in enumerate(byte_alphabet()) if char not in model["vocab"]]
    if kind != "BPE" or missing:
        why = f"{len(missing)} single bytes are not in its vocabulary" if missing else ""
        raise DataError(f"{path}: model type {kind}, byte-level BPE expected; {why}".rstrip("; "))
    added = data.get("added_tokens") or []
    for token in added:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise DataError(f"{path}: added_tokens entry {token!r} has no content")
        _require_id(token.get("id"), token["content"], path)
    return added


def _engine_from_json(data: dict[str, Any], path: Path) -> Engine:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises bare Exception for every fault of a file
        raise DataError(f"{path}: {error}") from error


def save(
    engine: Engine, special_tokens: Mapping[str, int], skippable: frozenset[int], folder: Path
) -> Path:
    """Write both files into `folder`; see `Tokenizer.save`."""
    data = json.loads(engine.to_str())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    by_id = sorted((token_id, name) for name, token_id in special_tokens.items())
    added = {i: {"content": name, "special": i in skippable, **plain} for i, name in by_id}
    data["added_tokens"] = [{"id": i, **entry} for i, entry in added.items()]
    roles = {"bos_token": special.BOS, "eos_token": special.EOS, "pad_token": special.PAD}
    config: dict[str, Any] = {role: name for role, name in roles.items() if name in special_tokens}
    config |= {"openk3_schema": SCHEMA, "tokenizer_class": "PreTrainedTokenizerFast"}
    config["added_tokens_decoder"] = {str(i): entry for i, entry in added.items()}
    write_json(folder / CONFIG_NAME, config)
    with atomic_file(folder / JSON_NAME, "w") as handle:
        json.dump(data, handle, ensure_ascii=False)
    return folder / JSON_NAME
