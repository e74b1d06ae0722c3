"""The model of a training run, ready to speak: weights of its newest whole checkpoint."""

from dataclasses import dataclass
from pathlib import Path

import torch

from openk3.checkpoint.training import CheckpointFolder, read
from openk3.config.model import ModelConfig
from openk3.errors import CheckpointError
from openk3.model.init import cast
from openk3.model.k3 import K3


@dataclass(frozen=True)
class Trained:
    """A loaded model and where it came from."""

    model: K3
    step: int
    """Optimizer steps it has seen."""
    path: Path
    """Its checkpoint folder."""


def is_training_output(path: str | Path) -> bool:
    """Whether `path` is a run folder or one of its checkpoints, not a published-format model."""
    path = Path(path)
    return (path / "checkpoints").is_dir() or (path / "state.json").is_file()


def load_trained(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Trained:
    """The model in a run folder (its newest whole checkpoint) or in one checkpoint folder.

    Raises CheckpointError when there is none or its tensors do not fit its config.
    """
    path = Path(path)
    if not (path / "state.json").is_file():
        path = CheckpointFolder(path / "checkpoints").newest()
    saved = read(path, only=("model",))
    model = K3(ModelConfig.from_hf(dict(saved.loop["model"])), seed=None)
    try:
        model.load_state_dict(saved.tensors["model"])
    except RuntimeError as error:  # torch names the tensors that are missing or misshapen
        raise CheckpointError(f"{path} does not fit its own config: {error}") from error
    cast(model, dtype)
    return Trained(model.to(device).eval(), saved.step, path)
