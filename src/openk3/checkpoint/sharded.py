"""Training checkpoints that all processes write together and any layout, or one process, reads.

    FOLDER/step_00000200/state.json      as `training` writes it, with "format": "sharded"
    FOLDER/step_00000200/.metadata       which file holds which rows (torch.distributed.checkpoint)
    FOLDER/step_00000200/__R_0.distcp    what process R wrote

A tensor is saved as boxes: rows of a whole, each written by one of the processes that hold it. So a
reader asks for the rows it wants and does not see how many processes wrote, or how they shared.
Saving copies the state to host memory and returns; a thread of every process writes it aside, and
when all are done the first one syncs and renames the folder. All must see one file system.
"""

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
from openk3.checkpoint.training import CheckpointFolder, read_state, write_state
from openk3.errors import CheckpointError, StorageError

FORMAT = "sharded"


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
        if self.is_main:
            write_state(aside, facts | {"format": FORMAT}, with_checksums=False)
            fsync_tree(aside)
            self.folder.publish(aside, path)
        return path

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
    wanted = {f"{part}/{n}": box for part, named in boxes.items() for n, box in named.items()}
    if read_state(path).get("format") == FORMAT:
        parts = tuple(f"{part}/" for part in boxes)
        saved = {n: facts for n, facts in tensors_of(path).items() if n.startswith(parts)}
        shapes = {name: tuple(facts.size) for name, facts in saved.items()}
        _require_fit(path, shapes, wanted)
        read_boxes(path, wanted)
        return
    for part, named in boxes.items():
        with safe_open(path / f"{part}.safetensors", "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            _require_fit(path, {n: tuple(s.get_shape()) for n, s in slices.items()}, named)
            for name, box in named.items():
                whole = slices[name]
                rows = slice(box.start, box.start + len(box.rows)) if box.shape else ...
                box.rows.detach().copy_(whole[rows])


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


def read_whole(path: Path, part: str, names: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """The tensors of one part, or those of `names`, whole, on the CPU. Raises CheckpointError."""
    found = {
        name.removeprefix(f"{part}/"): facts
        for name, facts in tensors_of(path).items()
        if name.startswith(f"{part}/")
    }
    tensors = {
        name: torch.empty(facts.size, dtype=facts.properties.dtype)
        for name, facts in found.items()
        if names is None or name in names
    }
    read_boxes(path, {f"{part}/{name}": Box.whole(t) for name, t in tensors.items()})
    return tensors


def tensors_of(path: Path) -> dict[str, TensorStorageMetadata]:
    """What a sharded checkpoint holds, by part/name. Raises CheckpointError."""
    try:
        metadata = FileSystemReader(path).read_metadata()
    except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"cannot read {path / '.metadata'}: {error}") from error
    held = metadata.state_dict_metadata
    return {n: facts for n, facts in held.items() if isinstance(facts, TensorStorageMetadata)}


def read_boxes(path: Path, boxes: Mapping[str, Box]) -> None:
    """Fill boxes, by part/name, from a sharded checkpoint. Raises CheckpointError."""
    some = {name: box for name, box in boxes.items() if box.rows.numel()}
    try:
        dcp.load(some, storage_reader=FileSystemReader(path), planner=_LoadPlanner(), no_dist=True)
    except CheckpointException as error:
        reasons = [str(reason) for reason, _ in error.failures.values()]
        raise CheckpointError(f"cannot read {path}: {'; '.join(reasons)}") from error


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
