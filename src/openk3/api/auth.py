"""API keys: where they come from, and who may call."""

import hmac
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from openk3.errors import ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ApiKeys:
    """The keys that open a server. Without any, it is open, which only loopback may be."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys = [key.strip().encode() for key in keys if key.strip()]

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def count(self) -> int:
        """How many keys there are."""
        return len(self._keys)

    def accept(self, given: str | None) -> bool:
        """Whether a caller's key is one of ours; takes the same time for every wrong key."""
        if not self._keys:
            return True
        word = (given or "").encode(errors="replace")
        matches = [hmac.compare_digest(word, key) for key in self._keys]  # never stops early
        return any(matches)


def given_key(headers: Mapping[str, str]) -> str | None:
    """The key of a request: `X-API-Key`, or `Authorization: Bearer`."""
    if key := headers.get("x-api-key"):
        return key
    scheme, _, word = headers.get("authorization", "").partition(" ")
    return word.strip() if scheme.lower() == "bearer" else None


def load_keys(given: Iterable[str], file: str | Path | None = None) -> ApiKeys:
    """Keys from the command line and from a file with one key a line.

    Raises ConfigError for a key file that is missing or that others may read.
    """
    keys = list(given)
    if file is not None:
        place = Path(file)
        if not place.is_file():
            raise ConfigError(f"key file {place} does not exist")
        if place.stat().st_mode & 0o077:
            raise ConfigError(f"key file {place} may be read by others; chmod 600 it")
        keys += place.read_text().split()
    return ApiKeys(keys)


def own_key(file: Path, prefix: str) -> str:
    """This machine's key, made on first use in a file that only its user can read."""
    if not file.exists():
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w") as out:
            out.write(prefix + secrets.token_hex(20) + "\n")
    return file.read_text().strip()


def require_safe_binding(host: str, keys: ApiKeys) -> None:
    """Raises ConfigError for a server that strangers could reach without a key."""
    if host not in LOOPBACK and not keys:
        raise ConfigError(
            f"refusing to listen on {host} without an API key: give one, or use 127.0.0.1"
        )
