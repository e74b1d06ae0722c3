"""What a configuration dataclass says about itself: field types, defaults, doc strings, paths."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Union

from openk3.config.model import ModelConfig
from openk3.config.presets import preset

PRESETS: dict[type, Any] = {ModelConfig: preset}
"""Classes whose table may start from a named instance: `preset = "nano"` plus changed keys."""


@dataclass(frozen=True)
class Leaf:
    """One settable value of a configuration class."""

    path: str
    """Dotted name, `train.steps`."""
    type: Any
    """Its annotation."""
    default: Any
    """Its default, or dataclasses.MISSING."""
    doc: str
    """The string under the field."""


@cache
def hints(cls: type) -> dict[str, Any]:
    """Field name -> resolved annotation, in definition order."""
    resolved = typing.get_type_hints(cls)
    return {f.name: resolved[f.name] for f in dataclasses.fields(cls) if f.init}


def optional(kind: Any) -> tuple[Any, bool]:
    """`X | None` -> (X, True); anything else -> (itself, False)."""
    if typing.get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    rest = tuple(k for k in typing.get_args(kind) if k is not type(None))
    inner = rest[0] if len(rest) == 1 else Union[rest]  # noqa: UP007  built from values
    return inner, len(rest) < len(typing.get_args(kind))


def is_config(kind: Any) -> bool:
    """Whether `kind` is a dataclass, so a table of its own."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def default_of(item: dataclasses.Field) -> Any:
    """A field's default value, or dataclasses.MISSING."""
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


@cache
def docs(cls: type) -> dict[str, str]:
    """Field name -> the doc string under it, over the class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _own_docs(base)
    return found


def _own_docs(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # a class made at run time has no source
        return {}
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    found = {}
    for item, below in itertools.pairwise(body):
        named = isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if named and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[item.target.id] = inspect.cleandoc(str(below.value.value))
    return found


def leaves(cls: type, prefix: str = "", base: Any = None) -> Iterator[Leaf]:
    """Every settable value below `cls`, nested dataclasses spelled out, in definition order.

    Defaults are those of `base`, an instance, where it is given.
    """
    if cls in PRESETS:
        yield Leaf(
            f"{prefix}preset",
            str,
            dataclasses.MISSING,
            "Named starting point; other keys change it.",
        )
    told, items = docs(cls), {f.name: f for f in dataclasses.fields(cls)}
    for name, kind in hints(cls).items():
        default = default_of(items[name]) if base is None else getattr(base, name)
        inner, _ = optional(kind)
        if is_config(inner):
            start = default if isinstance(default, inner) else None
            yield from leaves(inner, f"{prefix}{name}.", start)
        else:
            yield Leaf(f"{prefix}{name}", kind, default, told.get(name, ""))


def type_name(kind: Any) -> str:
    """How a person would call an annotation: `int`, `str or none`, `one of 'a', 'b'`."""
    inner, may_be_none = optional(kind)
    origin, args = typing.get_origin(inner), typing.get_args(inner)
    if origin is typing.Literal:
        name = "one of " + ", ".join(map(repr, args))
    elif origin in (Union, types.UnionType):
        name = " or ".join(type_name(k) for k in args)
    elif origin is tuple:
        items = [type_name(k) for k in args if k is not ...]
        name = f"list of {items[0]}" if ... in args else f"[{', '.join(items)}]"
    elif origin is dict:
        name = f"table of {type_name(args[1])}"
    elif is_config(inner):
        name = "table"
    else:
        name = getattr(inner, "__name__", str(inner))
    return f"{name} or none" if may_be_none else name
