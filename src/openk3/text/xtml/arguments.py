"""Tool-call arguments: Python and JSON values to typed XTML values, and back to JSON text."""

import json
from collections.abc import Mapping
from typing import Any

from openk3.errors import InputError

_TYPES = {bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}


def read_arguments(arguments: Any, where: str) -> dict[str, Any] | str:
    """The arguments of a call as a dict, or the raw string when it is not JSON.

    Args:
        arguments: mapping, JSON text of an object, or None or "" for none.
        where: the field's name for error messages.

    Raises:
        InputError: JSON of something else than an object, or neither mapping nor string.
    """
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, str):
        raise InputError(f"{where} must be an object or its JSON text, not {_kind(arguments)}")
    ok, value = try_json(arguments)
    if not ok:
        return arguments
    if not isinstance(value, dict):
        raise InputError(f"{where} must be a JSON object, found JSON {_kind(value)}")
    return value


def typed(value: Any, where: str) -> tuple[str, str]:
    """The XTML type of an argument and its text: strings raw, all else as JSON.

    Raises InputError when the value is not JSON (a set, a NaN, a key that is not a string, ...).
    """
    if isinstance(value, str):
        return "string", value
    if value is None:
        return "null", "null"
    kind = next((name for cls, name in _TYPES.items() if isinstance(value, cls)), None)
    if kind is None:
        raise InputError(f"{where} must be a JSON value, not {_kind(value)}")
    return kind, dump_json(value, where)


def dump_json(value: Any, where: str, *, canonical: bool = False) -> str:
    """JSON text with Python's default separators, or compact with sorted keys if `canonical`.

    Raises InputError naming `where` when the value has no JSON form.
    """
    layout: dict[str, Any] = {"separators": (",", ":"), "sort_keys": True} if canonical else {}
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False, **layout)
        _check_keys(value, where)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{where} has no JSON form: {error}") from None
    return written


def _check_keys(value: Any, where: str) -> None:
    # json.dumps turns keys like 1 or None into strings silently.
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise InputError(f"{where}: object keys must be strings, found {wrong[0]!r}")
    if isinstance(value, (dict, list, tuple)):
        for item in items:
            _check_keys(item, where)


def try_json(written: str) -> tuple[bool, Any]:
    """`(True, value)` of strict JSON text, else `(False, None)`. NaN and Infinity are not JSON."""
    try:
        return True, json.loads(written, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False, None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
