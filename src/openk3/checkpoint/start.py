"""The weights of an existing model as the first weights of a training run, in any layout.

Every process reads the rows it holds and no others, one tensor (one matrix of an expert) at a time,
so nobody needs memory for the whole model.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openk3.checkpoint.bridge import open_model, source_of
from openk3.checkpoint.hf.folder import Survey
from openk3.checkpoint.hf.layout import parameters
from openk3.checkpoint.hf.read import FileReader
from openk3.checkpoint.sharded import Box
from openk3.config.check import differences
from openk3.config.model import ModelConfig
from openk3.config.recipe import flatten
from openk3.errors import CheckpointError, ConfigError

FREE = {"quantization", "initializer_range", "max_position_embeddings"} | {
    f"{name}_token_id" for name in ("bos", "eos", "pad", "media_placeholder")
}
"""Fields of a config that a run may have otherwise: no weight depends on them."""


@torch.no_grad()
def fill_weights(
    path: str | Path,
    model: ModelConfig,
    boxes: Mapping[str, Box],
    progress: Callable[[], None] = lambda: None,
) -> Path:
    """Copy a model's weights into `boxes` (name -> rows in float32), in place.

    path: a model folder in any number format, a training run or one of its checkpoints.
    progress: called after each parameter. Returns the folder that holds the model's tokenizer, if
    it has one. Raises ConfigError naming the fields in which its model is not `model`,
    CheckpointError as `openk3.load` and for weights that are not finite.
    """
    found, home = open_model(path)
    require_same_model(found, model)
    with FileReader(mapped=False) as reader:
        source = source_of(found, reader)
        for parameter in parameters(found.config):
            box = boxes[parameter.name]
            if parameter.is_expert:
                for i, row in enumerate(box.rows.detach()):
                    row.copy_(source.values(parameter, box.start + i))
                    _require_finite(row, source.where(parameter, box.start + i))
            elif box.rows.numel():
                whole, rows = source.values(parameter), box.rows.detach()
                rows.copy_(whole[box.start : box.start + len(rows)] if box.shape else whole)
                _require_finite(rows, source.where(parameter))
            progress()
    return home


def require_same_model(found: Survey, model: ModelConfig) -> None:
    """Raises ConfigError unless the weights found are those of a `model`."""
    both = found.config.vision is not None and model.vision is not None
    odd = differences(_deciding(found.config, both), _deciding(model, both))
    if odd:
        raise ConfigError(f"{found.path} does not hold the model of this recipe: {odd}")


def _deciding(config: ModelConfig, with_vision: bool) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(config).items() if name not in FREE}
    if not with_vision:
        fields["vision"] = None if config.vision is None else "a tower"
    return flatten({"model": fields})


def _require_finite(rows: Tensor, where: str) -> None:
    if not rows.isfinite().all():
        raise CheckpointError(f"{where} holds values that are NaN or infinite")
