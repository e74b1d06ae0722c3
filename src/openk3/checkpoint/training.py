"""Training checkpoints: one folder a step, complete or absent, safetensors and JSON only.

    FOLDER/step_00000200/state.json              schema, step, what decides the run, loop state
    FOLDER/step_00000200/model.safetensors       float32 masters and buffers
    FOLDER/step_00000200/optimizer.safetensors   optimizer state

A folder is filled aside, synced and renamed, so a kill at any moment leaves the older ones whole.
state.json holds size and CRC-32 of every file, and its own CRC-32; a folder that does not match
them is passed over.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from openk3._io import atomic_dir, fsync_dir, read_json, require_disk
from openk3.config.check import differences
from openk3.errors import CheckpointError, StorageError

SCHEMA = 2
_NAME = re.compile(r"step_(\d{8,})")
_ASIDE = re.compile(r"\.step_\d{8,}\.\d+\.tmp")


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds, on the CPU."""

    step: int
    """Optimizer steps done."""
    tensors: Mapping[str, Mapping[str, Tensor]]
    """File stem -> name -> tensor."""
    deciding: Mapping[str, Any]
    """Settings that must be equal to go on; flat names -> JSON values."""
    loop: Mapping[str, Any] = field(default_factory=dict)
    """Small JSON state: data position, counters."""


class CheckpointFolder:
    """The checkpoints of one run, written by one process."""

    def __init__(self, path: str | Path, *, keep: int = 2) -> None:
        """keep: newest checkpoints that `save` leaves; 0 keeps all."""
        self.path, self.keep = Path(path), keep
        self.passed_over: list[str] = []
        """Why `latest` did not take newer folders, one sentence each."""

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write one checkpoint, then drop those beyond `keep`.

        Raises StorageError when the disk has no room; the older ones are then as they were.
        """
        path = self.path_of(checkpoint.step)
        self.sweep()
        require_disk(self.path, _num_bytes(checkpoint) + (1 << 20), "a checkpoint")
        if path.exists():  # torn, or superseded by a resume from an earlier step
            self._drop(path)
        with atomic_dir(path) as folder:
            for stem, tensors in checkpoint.tensors.items():
                _write_tensors(folder / f"{stem}.safetensors", tensors)
            facts = {
                "step": checkpoint.step,
                "deciding": dict(checkpoint.deciding),
                "loop": dict(checkpoint.loop),
            }
            write_state(folder, facts)
        self._retain()
        return path

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.path / f"step_{step:08d}"

    def publish(self, aside: Path, path: Path) -> None:
        """Give a folder that was written and synced aside its name; drop those beyond `keep`."""
        if path.exists():
            self._drop(path)
        os.rename(aside, path)
        fsync_dir(self.path)
        self._retain()

    def _retain(self) -> None:
        if self.keep:
            for old in self._steps()[: -self.keep]:
                self._drop(old)

    def newest(self) -> Path:
        """`latest`; CheckpointError where there is none, with what is wrong with the newest."""
        found = self.latest()
        if found is None:
            why = f": {self.passed_over[0]}" if self.passed_over else ""
            raise CheckpointError(
                f"{self.path.parent} holds no whole checkpoint{why}; train first (k3 pretrain), or "
                "give a folder step_N below checkpoints/"
            )
        return found

    def latest(self) -> Path | None:
        """The newest whole folder, or None; `passed_over` says what was wrong with newer ones."""
        self.passed_over = []
        for path in reversed(self._steps()):
            try:
                check(path)
            except CheckpointError as error:
                self.passed_over.append(str(error))
            else:
                return path
        return None

    def sweep(self) -> None:
        """Remove what killed writers left aside."""
        for path in self.path.glob(".step_*.tmp"):
            if _ASIDE.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _steps(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        found = [p for p in self.path.iterdir() if _NAME.fullmatch(p.name)]
        return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))

    def _drop(self, path: Path) -> None:
        # renamed first: a kill half-way through must not leave a torn folder under a good name
        aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        os.rename(path, aside)
        fsync_dir(self.path)
        shutil.rmtree(aside, ignore_errors=True)


def check(path: str | Path) -> dict[str, Any]:
    """state.json of a whole checkpoint; CheckpointError says what is missing or corrupt."""
    path = Path(path)
    state = read_state(path)
    for name, facts in state["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is incomplete: {name} is missing")
        size = file.stat().st_size
        if size != facts["bytes"]:
            raise CheckpointError(f"{file} is torn: {size} bytes, not {facts['bytes']}")
        if "crc32" in facts and _crc32(file) != facts["crc32"]:
            raise CheckpointError(f"{file} is corrupt: its CRC-32 is not the one in state.json")
    return state


def read(path: str | Path, *, only: tuple[str, ...] | None = None) -> Checkpoint:
    """A checkpoint whole, or only the file stems in `only`. Raises CheckpointError."""
    path = Path(path)
    state = check(path)
    if state.get("format") == "sharded":
        from openk3.checkpoint.sharded import read_whole

        parts = only or ("model", "optimizer")
        whole = {part: read_whole(path, part) for part in parts}
        return Checkpoint(state["step"], whole, state["deciding"], state["loop"])
    stems = [name.removesuffix(".safetensors") for name in state["files"]]
    try:
        tensors = {
            stem: load_file(path / f"{stem}.safetensors")
            for stem in stems
            if only is None or stem in only
        }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return Checkpoint(state["step"], tensors, state["deciding"], state["loop"])


def require_same(path: str | Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise CheckpointError naming the settings in which a checkpoint differs from a run."""
    if odd := differences(saved, wanted):
        raise CheckpointError(
            f"{path} belongs to another configuration: {odd}; go on with the settings it was made "
            "with, or start a new run in another folder"
        )


def write_state(folder: Path, facts: Mapping[str, Any], *, with_checksums: bool = True) -> None:
    """Write the state.json of a folder whose files are complete.

    It records their sizes, and unless reading them all again would take too long their CRC-32s.
    """
    files: dict[str, dict[str, int]] = {}
    for file in sorted(folder.iterdir()):
        files[file.name] = {"bytes": file.stat().st_size}
        if with_checksums:
            files[file.name]["crc32"] = _crc32(file)
    state = {"schema": SCHEMA, **facts, "files": files}
    state["crc32"] = _own_crc32(state)
    (folder / "state.json").write_text(json.dumps(state, indent=1) + "\n", "utf-8")


def read_state(path: Path) -> dict[str, Any]:
    """state.json, without a look at the files it lists. Raises CheckpointError."""
    if not (path / "state.json").exists():
        raise CheckpointError(f"{path} is no complete checkpoint: it has no state.json")
    state = read_json(path / "state.json", CheckpointError)
    if not {"schema", "step", "files"} <= state.keys():
        raise CheckpointError(f"{path / 'state.json'} is not a checkpoint's")
    if state["schema"] != SCHEMA:
        raise CheckpointError(
            f"{path} has schema {state['schema']}; this version reads {SCHEMA}, so use the "
            "version of openk3 that wrote it"
        )
    if state.get("crc32") != _own_crc32(state):
        raise CheckpointError(
            f"{path / 'state.json'} is corrupt: its content does not have the CRC-32 it records"
        )
    return state


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    flat = {name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}
    try:
        save_file(flat, file)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise StorageError(f"cannot write {file.name}: {error}") from error


def _num_bytes(checkpoint: Checkpoint) -> int:
    groups = checkpoint.tensors.values()
    return sum(t.numel() * t.element_size() for tensors in groups for t in tensors.values())


def _own_crc32(state: Mapping[str, Any]) -> int:
    content = {key: value for key, value in state.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _crc32(file: Path) -> int:
    crc = 0
    with open(file, "rb") as handle:
        while piece := handle.read(1 << 22):
            crc = zlib.crc32(piece, crc)
    return crc
