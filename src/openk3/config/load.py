"""Recipes: defaults < files left to right < dotted flags, every key known, every type checked.

    config = load(Recipe, ["recipes/nano.toml"], ["--train.steps=100", "--optim.lr", "3e-3"])

A recipe file is TOML; the config.json that a run folder keeps is accepted too.
"""

import json
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

from openk3.config import fields
from openk3.config.build import Place, Text, build, elsewhere
from openk3.errors import ConfigError, nearest

T = TypeVar("T")
Settings = list[tuple[dict[str, Any], str]]
"""One-key tables from flags, each with the flag it came from."""


def load(
    cls: type[T], files: Sequence[str | Path] = (), flags: Sequence[str] = (), base: T | None = None
) -> T:
    """The configuration `cls` from recipe files and dotted flags, over `base` or the defaults.

    Raises ConfigError that names the file or flag, the key, the nearest known key, or the type.
    """
    settings, rest = take_flags(cls, flags)
    if rest:
        raise ConfigError(f"{rest[0]!r} is neither a flag --section.key nor the value of one")
    return resolve(cls, files, settings, base)


def resolve(
    cls: type[T], files: Sequence[str | Path], settings: Settings, base: T | None = None
) -> T:
    """`load` with flags that `take_flags` has already read."""
    given = [(read(path), str(path)) for path in files]
    return build(cls, [*given, *settings], Place(cls), base)


def from_dict(cls: type[T], table: dict[str, Any], source: str = "config") -> T:
    """The configuration `cls` from a nested dict, as strictly as from a file."""
    return build(cls, [(table, source)], Place(cls))


def read(path: str | Path) -> dict[str, Any]:
    """The table in a TOML or JSON file. Raises ConfigError naming the file."""
    path = Path(path)
    try:
        text = path.read_text("utf-8")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        beside = [other.name for other in path.parent.glob(f"*{path.suffix}")]
        hint = nearest(path.name, beside)
        raise ConfigError(f"there is no recipe file {path}{hint}") from None
    except OSError as error:
        raise ConfigError(f"cannot read recipe {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # both decoders and UnicodeDecodeError
        raise ConfigError(
            f"{path} is not valid {path.suffix[1:].upper() or 'TOML'}: {error}"
        ) from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path} must hold a table of keys, not a {type(table).__name__}")
    saved_by_a_run = {"schema", "config"} <= table.keys() and isinstance(table["config"], dict)
    return table["config"] if saved_by_a_run else table


def take_flags(
    cls: type, argv: Sequence[str], own: Collection[str] = ()
) -> tuple[Settings, list[str]]:
    """Split a command line into settings of `cls` and everything else, order kept.

    `own` lists the verb's own options (`--out`), which are left alone. Values follow as
    `--train.steps 100` or `--train.steps=100`; a bare boolean flag means true.
    """
    settings: Settings = []
    rest, tokens = [], list(argv)
    while tokens:
        token = tokens.pop(0)
        name, has_value, text = token.partition("=")
        if not token.startswith("--") or token == "--" or name in own:
            rest.append(token)
            continue
        path = name[2:].replace("-", "_")
        kind = _type_of(cls, path, name, own)
        if not has_value:
            text = _next_value(tokens, kind, name)
        settings.append((_nested(path.split("."), Text(text)), name))
    return settings, rest


def _next_value(tokens: list[str], kind: Any, name: str) -> str:
    if fields.optional(kind)[0] is bool and (not tokens or tokens[0] not in ("true", "false")):
        return "true"
    if not tokens or tokens[0].startswith("--"):
        raise ConfigError(f"{name} needs a value: {fields.type_name(kind)}")
    return tokens.pop(0)


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return value


def _type_of(cls: type, path: str, name: str, own: Collection[str]) -> Any:
    kind: Any = cls
    for key in path.split("."):
        inner, _ = fields.optional(kind)
        if fields.is_config(inner):
            known = fields.hints(inner) | ({"preset": str} if inner in fields.PRESETS else {})
        else:
            known = dict.fromkeys([key], inner.__args__[1]) if _is_dict(inner) else {}
        if key not in known:
            paths = [f"--{leaf.path}" for leaf in fields.leaves(cls)]
            hint = elsewhere(key, cls) or nearest(name, {*paths, *own})
            raise ConfigError(f"unknown option {name}{hint}; --help lists them all")
        kind = known[key]
    return kind


def _is_dict(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is dict
