"""The JSON records. `boxes/ID/box.json` names the image that is the box's state: replacing that one
file is the switch to a new generation, and everything it does not name is rubbish to sweep."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from openk3._io import write_json
from openk3.errors import NotFoundError, StorageError
from openk3.sandbox.store.home import Home

FORMAT = 1


class Record:
    """A dataclass kept as one JSON file."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises NotFoundError without the file, StorageError when it is no such record."""
        try:
            raw = json.loads(path.read_text())
            known = {item.name for item in fields(cls)}  # pyright: ignore[reportArgumentType]
            return cls(**{key: value for key, value in raw.items() if key in known})
        except FileNotFoundError:
            raise NotFoundError(f"no record {path}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise StorageError(f"{path} is damaged: {error}") from error

    def save(self, path: Path) -> None:
        """Atomically and durably."""
        write_json(path, {"format": FORMAT, **asdict(self)})  # pyright: ignore[reportArgumentType]


@dataclass
class BoxRecord(Record):
    """`boxes/ID/box.json`."""

    id: str
    backend: str
    template: str
    state: str
    image: str | None = None
    """The committed generation; None until the first pause of a cold start."""
    previous: str | None = None
    """The generation before, kept until `image` has answered once."""
    own_image: bool = False
    """Whether `image` holds this box's own state, not just what it was created from."""
    limits: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    user: str = "user"
    created: float = 0.0
    timeout: float | None = None
    deadline: float | None = None
    on_timeout: str = "kill"
    idle_pause: float | None = None
    allow_files_only: bool = False
    generation: str = ""
    reason: str | None = None

    @staticmethod
    def path(home: Home, box_id: str) -> Path:
        return home.box(box_id) / "box.json"


@dataclass
class ImageManifest(Record):
    """`images/ID/manifest.json`: all that a restore needs, and what it must refuse to mix."""

    id: str
    backend: str
    engine: str
    """Exact build of the isolating program; a memory image is tied to it."""
    cpu: str
    """Processor features at the time; a memory image is tied to them."""
    template: str
    runtime: str
    layers: list[str] = field(default_factory=list)
    """Sealed uppers, oldest first."""
    memory: bool = True
    files: dict[str, list[int]] = field(default_factory=dict)
    """Name -> [size, crc32] of each file of the memory image."""
    packed: bool = False
    """The memory image is in the page store, not beside this manifest."""
    created: float = 0.0

    @staticmethod
    def path(home: Home, image_id: str) -> Path:
        return home.images / image_id / "manifest.json"


@dataclass
class SnapshotRecord(Record):
    """`snapshots/ID.json`."""

    id: str
    name: str | None
    image: str
    sandbox_id: str
    backend: str
    template: str
    limits: dict[str, Any]
    env: dict[str, str]
    user: str
    created: float
    memory: bool

    @staticmethod
    def path(home: Home, snapshot_id: str) -> Path:
        return home.snapshots / f"{snapshot_id}.json"
