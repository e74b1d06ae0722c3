"""A folder that holds a model, opened for serving: weights, tokenizer, image preprocessing."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from openk3 import checkpoint
from openk3.checkpoint.trained import is_training_output, load_trained
from openk3.errors import CheckpointError
from openk3.model.k3 import K3
from openk3.parallel.world import pick_device
from openk3.text import tokenizer as tokenizers
from openk3.text.image import ImageProcessor
from openk3.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Opened:
    """What `open_folder` found."""

    model: K3
    tokenizer: Tokenizer
    processor: ImageProcessor | None
    """None for a model that sees no pictures."""
    name: str
    """The folder's."""


def open_folder(
    path: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Opened:
    """The model in a run folder, in one of its checkpoints, or in a published-format folder.

    Args:
        path: the folder.
        device: cpu, cuda, cuda:N or auto.
        dtype: float32, bfloat16, or auto: bfloat16 on a GPU.
        progress: told the bytes that were read.

    Raises:
        CheckpointError or DataError: something is missing; the message says what.
    """
    path = Path(path)
    place = pick_device(device)
    name = dtype if dtype != "auto" else ("bfloat16" if place.type == "cuda" else "float32")
    kind: torch.dtype = getattr(torch, name)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; train a model with k3 quickstart first")
    if is_training_output(path):
        model = load_trained(path, device=place, dtype=kind).model
        home = path if (path / "checkpoints").is_dir() else path.parent.parent
    else:
        model = checkpoint.load(path, device=place, dtype=kind, progress=progress)
        home = path
    return Opened(model, tokenizers.load(home), _processor(model, home), path.resolve().name)


def _processor(model: K3, folder: Path) -> ImageProcessor | None:
    vision = model.config.vision
    if vision is None:
        return None
    sizes = {"patch_size": vision.patch_size, "merge_size": vision.merge_kernel_size[0]}
    return ImageProcessor.load(folder, **sizes)
