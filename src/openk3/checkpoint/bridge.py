"""Between training checkpoints and model folders.

A training checkpoint holds float32 masters under the model's own names, experts stacked, which is
the stacked layout in one file; its config stands in state.json.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from openk3._io import atomic_dir
from openk3.checkpoint import training
from openk3.checkpoint.hf.folder import Survey, compare, open_folder, usable
from openk3.checkpoint.hf.header import read_header
from openk3.checkpoint.hf.load import load
from openk3.checkpoint.hf.read import FileReader
from openk3.checkpoint.hf.source import FolderSource, Source
from openk3.checkpoint.hf.write import COMPANIONS, check_target
from openk3.checkpoint.trained import is_training_output
from openk3.config import ModelConfig
from openk3.errors import CheckpointError


def open_model(path: str | Path) -> tuple[Survey, Path]:
    """A model folder, a training run or one of its checkpoints, checked; and where its tokenizer
    files are. Raises CheckpointError or ConfigError."""
    path = Path(path)
    if not is_training_output(path):
        return open_folder(path), path
    run = path
    if (path / "state.json").is_file():
        run = path.parent.parent
    else:
        path = training.CheckpointFolder(path / "checkpoints").newest()
    return open_training(path), run


def open_training(path: Path) -> Survey:
    """One training checkpoint, its checksums verified, as a folder of stacked weights."""
    state = training.check(path)
    raw = state.get("loop", {}).get("model")
    sharded = state.get("format") == "sharded"
    if not isinstance(raw, dict) or not (sharded or "model.safetensors" in state["files"]):
        raise CheckpointError(f"{path} holds no model")
    config = ModelConfig.from_hf(raw).replace(quantization=None)  # masters are never packed
    if sharded:
        from openk3.checkpoint.sharded import Reader
        from openk3.checkpoint.sharded_source import entries_of

        entries = entries_of(Reader(path))
    else:
        entries = read_header(path / "model.safetensors")
    return usable(compare(Survey(path, config, config.to_hf(), entries)))


def source_of(found: Survey, reader: FileReader) -> Source:
    """The weights of a model that `open_model` or `open_training` found."""
    if not (found.path / ".metadata").exists():
        return FolderSource(found, reader)
    from openk3.checkpoint.sharded_source import ShardedSource

    return ShardedSource(found.path)


def to_training(
    source: str | Path, target: str | Path, *, progress: Callable[[int], None] | None = None
) -> Path:
    """Write a model folder's weights as the checkpoint of step 0 of a run folder `target`.

    Weights become float32 masters, experts are dequantised; there is no optimizer state. The whole
    model must fit in memory. Raises as `openk3.load`; InputError for a target in use.
    """
    target = Path(target)
    check_target(target)
    model = load(source, dtype=torch.float32, progress=progress)
    facts: dict[str, Any] = {"model": model.config.replace(quantization=None).to_hf()}
    checkpoint = training.Checkpoint(0, {"model": model.state_dict()}, {}, facts)
    with atomic_dir(target) as folder:
        training.CheckpointFolder(folder / "checkpoints").save(checkpoint)
        for name in COMPANIONS:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, folder / name)
    return target / "checkpoints" / "step_00000000"
