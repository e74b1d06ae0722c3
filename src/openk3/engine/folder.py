"""A folder that holds a model, opened for serving: weights, tokenizer, image preprocessing."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from openk3 import checkpoint
from openk3.checkpoint.hf.folder import survey
from openk3.checkpoint.trained import is_training_output, load_trained
from openk3.errors import CheckpointError, ConfigError, DataError, InputError
from openk3.model.k3 import K3
from openk3.parallel.world import pick_device, pick_dtype
from openk3.text import tokenizer as tokenizers
from openk3.text.image import CONFIG_NAME, ImageProcessor
from openk3.text.tokenizer import Tokenizer

Form = Literal["auto", "packed", "dequant"]


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
    experts: Form = "auto",
    expert_cache_gb: float | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Opened:
    """The model in a run folder, in one of its checkpoints, or in a published-format folder.

    Args:
        path: the folder.
        device: cpu, cuda, cuda:N or auto.
        dtype: float32, bfloat16, or auto: bfloat16 on a GPU.
        experts: of a published-format folder. "packed" keeps MXFP4 ones as they are stored,
            "dequant" makes them ordinary weights; auto: packed on a GPU, whose kernels read them,
            dequantised on a CPU, where packed ones save memory and cost time.
        expert_cache_gb: leave the experts of a published-format folder on disk, behind a cache of
            so many 10^9 bytes.
        progress: told the bytes that were read.

    Raises:
        CheckpointError or DataError: something is missing, or the tokenizer has ids that the model
            has no row for; the message says what.
        ConfigError: an unknown device or dtype, or pictures would be prepared for another model.
        InputError: a training run, whose experts cannot be streamed or packed.
    """
    path = Path(path)
    place = pick_device(device)
    kind = pick_dtype(dtype, place)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; train a model with k3 quickstart first")
    if is_training_output(path):
        if expert_cache_gb is not None or experts == "packed":
            raise InputError(
                f"{path} is a training run, whose experts cannot be "
                f"{'packed' if experts == 'packed' else 'streamed'}; convert it first: "
                f"k3 convert {path} FOLDER"
            )
        model = load_trained(path, device=place, dtype=kind).model
        home = path if (path / "checkpoints").is_dir() else path.parent.parent
    else:
        model = checkpoint.load(
            path,
            device=place,
            dtype=kind,
            experts=_form(path, place, experts) if expert_cache_gb is None else "stream",
            expert_cache_gb=expert_cache_gb,
            progress=progress,
        )
        home = path
    return Opened(model, _tokenizer(model, home), _processor(model, home), path.resolve().name)


def _form(path: Path, device: torch.device, experts: Form) -> Literal["dequant", "packed"]:
    if experts != "auto":
        return experts
    packed = device.type == "cuda" and survey(path).packed_experts
    return "packed" if packed else "dequant"


def _tokenizer(model: K3, folder: Path) -> Tokenizer:
    tokenizer, rows = tokenizers.load(folder), model.config.vocab_size
    if tokenizer.vocab_size > rows:
        raise DataError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} ids, config.json a vocab_size of "
            f"{rows}: the tokenizer is of another vocabulary"
        )
    return tokenizer


def _processor(model: K3, folder: Path) -> ImageProcessor | None:
    vision = model.config.vision
    if vision is None:
        return None
    sizes = {"patch_size": vision.patch_size, "merge_size": vision.merge_kernel_size[0]}
    processor = ImageProcessor.load(folder, **sizes)
    for name, size in sizes.items():
        if getattr(processor, name) != size:
            raise ConfigError(
                f"{folder / CONFIG_NAME}: {name} is {getattr(processor, name)}, the model's "
                f"vision_config says {size}"
            )
    return processor
