"""Tables from TOML, JSON or flags to the dataclass they describe, or a ConfigError that says why.

TOML has no null, so the word "none" stands for it wherever a field may be None.
"""

import dataclasses
import pathlib
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, Union

from openk3.config import fields
from openk3.config.fields import optional, type_name
from openk3.errors import ConfigError, nearest

T = TypeVar("T")
Given = Sequence[tuple[Any, str]]
"""Values of one field and where each came from (a file or a flag); the last wins."""


class Text(str):
    """A value typed on the command line: it still has to be read as the field's type."""


@dataclass(frozen=True)
class Place:
    """Where in which configuration a value stands, for messages."""

    root: type
    path: str = ""
    source: str = ""

    def down(self, name: str) -> "Place":
        return dataclasses.replace(self, path=f"{self.path}.{name}" if self.path else name)

    def of(self, source: str) -> "Place":
        return dataclasses.replace(self, source=source)

    def wrong(self, value: Any, kind: Any) -> ConfigError:
        """The error for a value of a wrong type."""
        name = type_name(kind)
        name = (
            name
            if name.startswith(("one of", "["))
            else f"{'an' if name[0] in 'aei' else 'a'} {name}"
        )
        shown = str(value) if isinstance(value, Text) else value
        return ConfigError(f"{self.source}: {self.path} must be {name}, not {shown!r}")


def build(cls: type[T], given: Given, place: Place, base: T | None = None) -> T:
    """A `cls` from tables, later ones winning, over the values of `base` or else the defaults.

    Raises ConfigError for an unknown key (naming the nearest), a wrong type, a missing value, or
    what the class itself refuses.
    """
    for table, source in given:
        _check_keys(cls, table, place.of(source))
    kinds, base = fields.hints(cls), _named_base(cls, given, place) or base
    values: dict[str, Any] = {}
    for item in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        if item.name not in kinds:
            continue
        start = fields.default_of(item) if base is None else getattr(base, item.name)
        here = [(table[item.name], source) for table, source in given if item.name in table]
        values[item.name] = _field(kinds[item.name], here, place.down(item.name), start)
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"[{place.path}] {error}" if place.path else str(error)) from error


def convert(value: Any, kind: Any, place: Place) -> Any:
    """`value` as a `kind`. Raises ConfigError naming the place, the value and the type."""
    inner, may_be_none = optional(kind)
    if inner is Any:
        return _opaque(value)
    if may_be_none and is_none(value):
        return None
    if fields.is_config(inner):
        return build(inner, [(_table(value, kind, place), place.source)], place)
    origin, args = typing.get_origin(inner), typing.get_args(inner)
    if origin is typing.Literal:
        return _choice(value, args, place)
    if origin in (Union, types.UnionType):
        return _first_fit(value, args, kind, place)
    if origin is tuple:
        return _tuple(value, args, kind, place)
    if origin is dict:
        table = _table(value, kind, place)
        return {str(k): convert(v, args[1], place.down(str(k))) for k, v in table.items()}
    return _scalar(value, inner, kind, place)


def is_none(value: Any) -> bool:
    """Whether a TOML, JSON or flag value means None."""
    return value is None or (isinstance(value, str) and value.lower() == "none")


def _field(kind: Any, given: Given, place: Place, start: Any) -> Any:
    inner, may_be_none = optional(kind)
    if not given:
        return _required(inner, place) if start is dataclasses.MISSING else start
    if may_be_none and is_none(given[-1][0]):
        return None
    if not fields.is_config(inner) and typing.get_origin(inner) is not dict:
        return convert(given[-1][0], kind, place.of(given[-1][1]))
    tables = [(_table(value, kind, place.of(source)), source) for value, source in given]
    if fields.is_config(inner):
        return build(inner, tables, place, start if isinstance(start, inner) else None)
    merged: dict[str, Any] = {}
    for table, source in tables:
        merged |= convert(table, inner, place.of(source))
    return merged


def _required(inner: Any, place: Place) -> Any:
    if fields.is_config(inner):
        return build(inner, [], place)
    raise ConfigError(
        f"{place.path} is required: set it in a recipe or pass --{place.path} ({type_name(inner)})"
    )


def _named_base(cls: type[T], given: Given, place: Place) -> T | None:
    names = [(table["preset"], source) for table, source in given if "preset" in table]
    if cls not in fields.PRESETS or not names:
        return None
    place = place.down("preset").of(names[-1][1])
    name = convert(names[-1][0], str, place)
    try:
        return fields.PRESETS[cls](name)
    except ConfigError as error:
        raise ConfigError(f"{place.source}: {place.path}: {error}") from error


def _check_keys(cls: type, table: dict[str, Any], place: Place) -> None:
    known = [*fields.hints(cls), *(["preset"] if cls in fields.PRESETS else [])]
    for key in table:
        if key not in known:
            hint = nearest(key, set(known)) or elsewhere(key, place.root)
            where = f"[{place.path}]" if place.path else "the top level"
            raise ConfigError(
                f"{place.source}: unknown key {place.down(key).path!r}{hint}; "
                f"{where} has {', '.join(known)}"
            )


def elsewhere(key: str, root: type) -> str:
    """A hint naming the fields of any table under `root` that are called `key`, or nothing."""
    paths = [leaf.path for leaf in fields.leaves(root)]
    same = [path for path in paths if path.rpartition(".")[2] == key]
    return f" (did you mean {' or '.join(map(repr, same))}?)" if same else ""


def _scalar(value: Any, inner: Any, kind: Any, place: Place) -> Any:
    if isinstance(value, Text):
        value = _read_scalar(value, inner)
    if inner is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if inner is pathlib.Path and isinstance(value, str):
        return pathlib.Path(value)
    if not isinstance(value, inner) or (inner is not bool and isinstance(value, bool)):
        raise place.wrong(value, kind)
    return value


def _read_scalar(text: Text, inner: Any) -> Any:
    if inner is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if inner in (int, float):
        try:
            return inner(text)
        except ValueError:
            return text
    return str(text)


def _choice(value: Any, allowed: tuple, place: Place) -> Any:
    for option in allowed:
        if value == option or (isinstance(value, Text) and str(option) == value):
            return option
    hint = nearest(str(value), {str(option) for option in allowed})
    raise ConfigError(
        f"{place.source}: {place.path} is {str(value)!r}{hint}; "
        f"allowed are {', '.join(map(repr, allowed))}"
    )


def _first_fit(value: Any, kinds: tuple, kind: Any, place: Place) -> Any:
    for option in kinds:
        try:
            return convert(value, option, place)
        except ConfigError:
            continue
    raise place.wrong(value, kind)


def _tuple(value: Any, args: tuple, kind: Any, place: Place) -> tuple:
    if isinstance(value, Text) and value.startswith("["):
        value = _read_toml(value, kind, place)
    elif isinstance(value, Text):
        value = [Text(piece.strip()) for piece in value.split(",") if piece.strip()]
    if not isinstance(value, (list, tuple)):
        raise place.wrong(value, kind)
    kinds = (args[0],) * len(value) if ... in args else args
    if len(kinds) != len(value):
        raise place.wrong(value, kind)
    triples = zip(range(len(value)), value, kinds, strict=True)
    return tuple(convert(v, k, place.down(str(i))) for i, v, k in triples)


def _table(value: Any, kind: Any, place: Place) -> dict[str, Any]:
    table = _read_toml(value, kind, place) if isinstance(value, Text) else value
    if not isinstance(table, dict):
        raise place.wrong(value, kind)
    return table


def _read_toml(text: str, kind: Any, place: Place) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raise place.wrong(text, kind) from None


def _opaque(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _opaque(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_opaque(item) for item in value]
    return None if is_none(value) else value
