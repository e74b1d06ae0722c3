"""Configurations as plain dicts, TOML text, help text and differences."""

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openk3.config import fields


def to_dict(config: Any) -> Any:
    """A dataclass instance as JSON-ready dicts and lists, every field spelled out."""
    if dataclasses.is_dataclass(config):
        names = fields.hints(type(config))  # pyright: ignore[reportArgumentType]
        return {name: to_dict(getattr(config, name)) for name in names}
    if isinstance(config, dict):
        return {str(key): to_dict(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_dict(value) for value in config]
    return str(config) if isinstance(config, Path) else config


def to_toml(config: Any) -> str:
    """A dataclass instance or nested dict as TOML that `load` reads back to the same values."""
    return "\n".join(_table(to_dict(config), "")).strip() + "\n"


def _table(table: dict[str, Any], path: str) -> Iterator[str]:
    nested = {key: value for key, value in table.items() if isinstance(value, dict) and value}
    arrays = {
        k: v for k, v in table.items() if isinstance(v, list) and v and isinstance(v[0], dict)
    }
    for key, value in table.items():
        if key not in nested and key not in arrays:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in nested.items():
        yield from ("", f"[{path}{_key(key)}]", *_table(value, f"{path}{_key(key)}."))
    for key, items in arrays.items():
        for item in items:
            yield from ("", f"[[{path}{_key(key)}]]", *_table(item, f"{path}{_key(key)}."))


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def describe(cls: type, width: int = 100) -> str:
    """The settings of `cls` for `--help`: a dotted flag, its type, its doc string, its default."""
    lines: list[str] = []
    table = None
    for leaf in fields.leaves(cls):
        if (here := leaf.path.rpartition(".")[0]) != table:
            table = here
            lines += ["", f"[{here}]" if here else "[top level]"]
        text = " ".join(leaf.doc.split())
        if leaf.default is not dataclasses.MISSING:
            text += f" (default {_value(to_dict(leaf.default))})"
        lines.append(f"  --{leaf.path} {_shown_type(leaf.type)}")
        lines += textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines).strip("\n")


def _shown_type(kind: Any) -> str:
    """In capitals, but for the values that have to be given as they are."""
    parts = fields.type_name(kind).split("'")
    return "'".join(part if i % 2 else part.upper() for i, part in enumerate(parts))


def diff(old: Any, new: Any, path: str = "") -> list[str]:
    """Lines `train.lr: 0.1 -> 0.2` for every value that differs between two configurations."""
    old, new = to_dict(old), to_dict(new)
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [f"{path}: {old!r} -> {new!r}"]
    lines = []
    for key in dict.fromkeys([*old, *new]):
        where = f"{path}.{key}" if path else key
        lines += diff(old.get(key), new.get(key), where)
    return lines
