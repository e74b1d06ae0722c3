"""Stores that pages may be kept in behind the host tier: a folder, or Mooncake on many machines."""

import json
import os
from pathlib import Path
from typing import Any, Protocol

from openk3._io import atomic_file
from openk3.errors import BackendError, ConfigError, StorageError


class KeyValueStore(Protocol):
    """Bytes by name. Methods may be called from several threads, and raise OSError or
    BackendError; the engine then goes on without the store."""

    def put(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None: ...

    def is_exist(self, key: str) -> bool: ...


class FolderStore:
    """One file a key. Nothing is ever deleted: the folder's size is its owner's business.

    Raises StorageError for a folder that cannot be made or written to."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"external: no folder {folder}: {error.strerror}") from error
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise StorageError(f"external: {folder} cannot be written to")

    def put(self, key: str, value: bytes) -> None:
        with atomic_file(self.folder / key) as file:
            file.write(value)

    def get(self, key: str) -> bytes | None:
        try:
            return (self.folder / key).read_bytes()
        except FileNotFoundError:
            return None

    def is_exist(self, key: str) -> bool:
        return (self.folder / key).exists()


SETTINGS = {
    "local_hostname": "localhost",
    "metadata_server": "P2PHANDSHAKE",
    "global_segment_size": 4 << 30,
    "local_buffer_size": 1 << 30,
    "protocol": "tcp",
    "device_name": "",
    "master_server_address": "127.0.0.1:50051",
}
"""Keys of Mooncake's own JSON settings, in the order of its `setup`, and what is taken without."""


class MooncakeStore:
    """A Mooncake store (pip install mooncake-transfer-engine), through its Python client.

    `settings` is a file as MOONCAKE_CONFIG_PATH names it. Raises BackendError, ConfigError."""

    def __init__(self, settings: str | Path, client: Any = None) -> None:
        try:
            given = json.loads(Path(settings).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{settings}: no Mooncake settings: {error}") from None
        if unknown := given.keys() - SETTINGS.keys():
            raise ConfigError(f"{settings}: unknown keys {sorted(unknown)}; known: {[*SETTINGS]}")
        self._client = client or _mooncake_client()
        code = self._client.setup(*(SETTINGS | given).values())
        if code:
            raise BackendError(f"Mooncake's setup failed with code {code}; see {settings}")

    def put(self, key: str, value: bytes) -> None:
        if code := self._client.put(key, value):
            raise BackendError(f"Mooncake's put failed with code {code}")

    def get(self, key: str) -> bytes | None:
        return bytes(self._client.get(key)) or None  # what is not there is empty

    def is_exist(self, key: str) -> bool:
        found = self._client.is_exist(key)
        if found < 0:
            raise BackendError(f"Mooncake's is_exist failed with code {found}")
        return bool(found)


def _mooncake_client() -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]
    except ImportError as error:
        raise BackendError(
            f"Mooncake's client cannot be imported ({error}); "
            "pip install mooncake-transfer-engine, or leave external out"
        ) from None
    return MooncakeDistributedStore()


def open_store(text: str) -> KeyValueStore:
    """The store that `EngineConfig.external` names: folder:PATH or mooncake:SETTINGS.json.

    Raises ConfigError for other names, StorageError or BackendError for a store that cannot be had.
    """
    kind, _, where = text.partition(":")
    if kind not in ("folder", "mooncake") or not where:
        raise ConfigError(f'external must be "folder:PATH" or "mooncake:SETTINGS.json", not {text}')
    return FolderStore(where) if kind == "folder" else MooncakeStore(where)
