"""Checked access to the fields of messages; errors name the field as the caller wrote it."""

from collections.abc import Mapping
from typing import Any

from openk3.errors import InputError


def get(mapping: Any, key: str, where: str) -> Any:
    """`mapping[key]`. Raises InputError when `where` is no object or lacks the key."""
    if not isinstance(mapping, Mapping):
        raise InputError(f"{where} must be an object, not {type(mapping).__name__}")
    if key not in mapping:
        raise InputError(f"{where}.{key} is missing")
    return mapping[key]


def text(value: Any, where: str) -> str:
    """`value` if it is a string. Raises InputError naming `where` otherwise."""
    if not isinstance(value, str):
        raise InputError(f"{where} must be text, not {type(value).__name__}")
    return value
