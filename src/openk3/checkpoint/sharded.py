"""Training checkpoints that all processes write together and any layout, or one process, reads.

    FOLDER/step_00000200/state.json      as `training` writes it, with "format": "sharded"
    FOLDER/step_00000200/.metadata       which file holds which rows (torch.distributed.checkpoint)
    FOLDER/step_00000200/__R_0.distcp    what process R wrote

A tensor is saved as boxes: rows of a whole, each written by one of the processes that hold it. So a
reader asks for the rows it wants and does not see how many processes wrote, or how they shared.
Saving copies the state to host memory and returns; a thread of every process writes it aside, and
when all are done the first one syncs and renames the folder. All must see one file system.
"""

import os
import pickle
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from openk3._io import fsync_tree, require_disk
from openk3.checkpoint.sharded_metadata import read_metadata
from openk3.checkpoint.training import CheckpointFolder, read_state, write_state
from openk3.errors import CheckpointError, StorageError

FORMAT = "sharded"
_UNREADABLE = (OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError)


@dataclass(frozen=True)
class Box:
    """The rows [start, start + len(rows)) of a tensor of `shape`."""

    rows: Tensor
    shape: tuple[int, ...]
    start: int = 0

    @classmethod
    def whole(cls, tensor: Tensor) -> "Box":
        """A tensor that is all here."""
        return cls(tensor, tuple(tensor.shape))

    def staged(self) -> "Box":
        """A copy in host memory."""
        return Box(self.rows.detach().to("cpu", copy=True), self.shape, self.start)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where the rows lie in the whole."""
        offsets = torch.Size((self.start, *(0 for _ in self.shape[1:])) if self.shape else ())
        return ChunkStorageMetadata(offsets, self.rows.shape)


Boxes = Mapping[str, Mapping[str, Box]]
"""Part ("model", "optimizer") -> name -> box."""


class ShardedFolder:
    """The checkpoints of one run, written by all its processes; every process has one of these."""

    def __init__(self, folder: CheckpointFolder) -> None:
        """Every process must call this."""
        self.folder = folder
        self.group: Any = dist.new_group(backend="gloo")  # its own, because a thread talks in it
        self.is_main = dist.get_rank() == 0
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None

    def save(
        self, step: int, boxes: Boxes, deciding: Mapping[str, Any], loop: Mapping[str, Any]
    ) -> Path | None:
        """Begin a checkpoint; returns the one before, if it was still being written till now.

        Every process must call this. Raises StorageError if the one before could not be written.
        """
        before = self.wait()
        staged = {
            f"{part}/{name}": box.staged()
            for part, named in boxes.items()
            for name, box in named.items()
        }
        facts = {"step": step, "deciding": dict(deciding), "loop": dict(loop)}
        self._pending = self._thread.submit(self._write, staged, facts)
        return before

    def finished(self) -> Path | None:
        """The checkpoint that has become whole since the last call. Raises StorageError."""
        if self._pending is None or not self._pending.done():
            return None
        return self.wait()

    def wait(self) -> Path | None:
        """Wait for what is being written; its path. Raises StorageError."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def _write(self, staged: dict[str, Box], facts: dict[str, Any]) -> Path:
        path = self.folder.path_of(facts["step"])
        aside = path.with_name(f".{path.name}.0.tmp")
        self._agree(self._make_room(path, aside, staged) if self.is_main else None)
        try:
            dcp.save(
                dict(staged),
                storage_writer=FileSystemWriter(aside),
                planner=_SavePlanner(),
                process_group=self.group,
            )
        except CheckpointException as error:
            reasons = {rank: str(reason) for rank, (reason, _) in error.failures.items()}
            raise StorageError(f"cannot write {path}: by rank, {reasons}") from error
        self._agree(self._publish(aside, path, facts) if self.is_main else None)
        return path

    def _publish(self, aside: Path, path: Path, facts: dict[str, Any]) -> str | None:
        """Give what all have written its name; why it cannot have it."""
        try:
            written = read_metadata(aside / ".metadata").storage_data.values()
            if absent := {info.relative_path for info in written} - {*os.listdir(aside)}:
                return (
                    f"cannot write {path}: {min(absent)} has not come here; all processes must see "
                    "one file system"
                )
            write_state(aside, facts | {"format": FORMAT}, with_checksums=False)
            fsync_tree(aside)
            self.folder.publish(aside, path)
        except OSError as error:
            return f"cannot write {path}: {error}"
        return None

    def _make_room(self, path: Path, aside: Path, staged: dict[str, Box]) -> str | None:
        """Clean up and look at the disk; why it cannot go on, for everyone to hear."""
        try:
            self.folder.sweep()
            require_disk(path.parent, whole_bytes(staged) + (1 << 20), "a checkpoint")
            aside.mkdir(parents=True)
        except (OSError, StorageError) as error:
            return str(error)
        return None

    def _agree(self, refusal: str | None) -> None:
        box = [refusal]
        dist.broadcast_object_list(box, src=0, group=self.group)
        if box[0] is not None:
            raise StorageError(box[0])


def whole_bytes(boxes: Mapping[str, Box]) -> int:
    """Bytes of the whole tensors."""
    return sum(torch.Size(b.shape).numel() * b.rows.element_size() for b in boxes.values())


def fill(path: Path, boxes: Boxes) -> None:
    """Copy the rows of a checkpoint of either form into `boxes`, in place, without a collective.

    Raises CheckpointError naming a tensor that is missing, too many or of another shape.
    """
    if read_state(path).get("format") == FORMAT:
        reader = Reader(path)
        for part, named in boxes.items():
            held = reader.part(part)
            _require_fit(path, {n: tuple(facts.size) for n, facts in held.items()}, named)
            reader.fill(part, named)
        return
    for part, named in boxes.items():
        with safe_open(path / f"{part}.safetensors", "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            _require_fit(path, {n: tuple(s.get_shape()) for n, s in slices.items()}, named)
            for name, box in named.items():
                rows = slice(box.start, box.start + len(box.rows)) if box.shape else ...
                box.rows.detach().copy_(slices[name][rows])


def _require_fit(
    path: Path, shapes: Mapping[str, tuple[int, ...]], boxes: Mapping[str, Box]
) -> None:
    if odd := sorted(shapes.keys() ^ boxes.keys()):
        raise CheckpointError(
            f"{path} does not fit this model: {len(odd)} tensors differ, first {odd[0]!r}"
        )
    for name, box in boxes.items():
        if shapes[name] != box.shape:
            raise CheckpointError(
                f"{path} has {name!r} with shape {list(shapes[name])}; this model needs "
                f"{list(box.shape)}"
            )


def read_whole(path: Path, part: str) -> dict[str, Tensor]:
    """The tensors of one part, whole, on the CPU. Raises CheckpointError."""
    reader = Reader(path)
    tensors = {
        name: torch.empty(facts.size, dtype=facts.properties.dtype)
        for name, facts in reader.part(part).items()
    }
    reader.fill(part, {name: Box.whole(tensor) for name, tensor in tensors.items()})
    return tensors


class Reader:
    """A sharded checkpoint, opened by one process for itself. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path, self._files = path, FileSystemReader(path)
        self._metadata = read_metadata(path / ".metadata")
        self._files.set_up_storage_reader(self._metadata, is_coordinator=True)

    def part(self, part: str) -> dict[str, TensorStorageMetadata]:
        """Shape, dtype and chunks of the tensors of one part, by name."""
        held = self._metadata.state_dict_metadata
        return {
            name.removeprefix(f"{part}/"): facts
            for name, facts in held.items()
            if name.startswith(f"{part}/") and isinstance(facts, TensorStorageMetadata)
        }

    def fill(self, part: str, boxes: Mapping[str, Box]) -> None:
        """Copy the rows that the boxes ask for."""
        planner = _LoadPlanner()
        wanted = {f"{part}/{name}": box for name, box in boxes.items() if box.rows.numel()}
        planner.set_up_planner(wanted, self._metadata, is_coordinator=True)
        try:
            self._files.read_data(planner.create_local_plan(), planner).wait()
        except _UNREADABLE as error:
            raise CheckpointError(f"cannot read {self.path}: {error}") from error


class _SavePlanner(DefaultSavePlanner):
    """Boxes to chunks; equal chunks of several processes are written by one."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(name, box.chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=box.chunk,
                    properties=TensorProperties.create_from_tensor(box.rows),
                    size=torch.Size(box.shape),
                ),
            )
            for name, box in self.state_dict.items()
            if box.rows.numel()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].rows


class _LoadPlanner(DefaultLoadPlanner):
    """The saved chunks that overlap each box."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata = state_dict, metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "a reader has read the metadata"
        items = []
        for name, box in self.state_dict.items():
            facts = self.metadata.state_dict_metadata[name]
            assert isinstance(facts, TensorStorageMetadata), "boxes are tensors"
            items += create_read_items_for_chunk_list(name, facts, [box.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].rows.detach()
