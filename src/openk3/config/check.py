"""Validation helpers of the configuration dataclasses."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from openk3.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def at_least(config: Any, minimum: float, *names: str) -> None:
    """Each named field must be finite and at least `minimum`."""
    for name in names:
        value = getattr(config, name)
        finite = minimum <= value < float("inf")
        require(finite, f"{name} ({value}) must be at least {minimum} and finite")


def require_seed(seed: int) -> None:
    """Raise ConfigError for a seed that torch's generators cannot take: they hold 64 bits."""
    require(0 <= seed < 2**63, f"seed ({seed}) must lie in [0, 2**63)")


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What two flat configurations do not share: `optim.lr is 1 there, 2 here`, at most four of
    them and how many more; empty where they are equal."""
    odd = [k for k in sorted(there.keys() | here.keys()) if there.get(k) != here.get(k)]
    shown = "; ".join(f"{k} is {there.get(k)!r} there, {here.get(k)!r} here" for k in odd[:4])
    return shown + (f" and {len(odd) - 4} more" if len(odd) > 4 else "")


def number_fields(config: Any, prefix: str, zero_ok: tuple[str, ...] = ()) -> None:
    """Every field annotated `int` must hold an int from 1 (0 where `zero_ok` names it) to 2^31,
    every one annotated `float` (or `float | None`) a finite number."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        name = f"{prefix}.{item.name}" if prefix else item.name
        if item.type in (float, "float") or (item.type == float | None and value is not None):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            require(
                number and math.isfinite(value), f"{name} must be a finite number, not {value!r}"
            )
        if item.type in (int, "int"):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{name} must be an integer, not {value!r}")
            least = 0 if item.name in zero_ok else 1
            require(value >= least, f"{name} ({value}) must be at least {least}")
            require(value < 2**31, f"{name} ({value}) must be below 2^31")
