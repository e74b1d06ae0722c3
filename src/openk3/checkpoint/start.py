"""The weights of an existing model as the first weights of a training run, in any layout.

Every process reads the rows it holds and no others, one tensor (one matrix of an expert) at a time,
so nobody needs memory for the whole model.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from openk3.checkpoint.bridge import open_model, source_of
from openk3.checkpoint.hf.folder import Survey
from openk3.checkpoint.hf.layout import parameters
from openk3.checkpoint.hf.read import FileReader
from openk3.checkpoint.sharded import Box
from openk3.config.model import ModelConfig
from openk3.errors import ConfigError

FREE = {"quantization", "initializer_range", "max_position_embeddings"} | {
    f"{name}_token_id" for name in ("bos", "eos", "pad", "media_placeholder")
}
"""Fields of a config that a run may have otherwise: no weight depends on them."""


@torch.no_grad()
def fill_weights(path: str | Path, model: ModelConfig, boxes: Mapping[str, Box]) -> None:
    """Copy a model's weights into `boxes` (name -> rows in float32), in place.

    path: a model folder in any number format, a training run or one of its checkpoints. Raises
    ConfigError naming the fields in which its model is not `model`, CheckpointError as
    `openk3.load`.
    """
    found, _ = open_model(path)
    require_same_model(found, model)
    with FileReader(mapped=False) as reader:
        source = source_of(found, reader)
        for parameter in parameters(found.config):
            box = boxes[parameter.name]
            if parameter.is_expert:
                for i, row in enumerate(box.rows.detach()):
                    row.copy_(source.values(parameter, box.start + i))
            elif box.rows.numel():
                whole, rows = source.values(parameter), box.rows.detach()
                rows.copy_(whole[box.start : box.start + len(rows)] if box.shape else whole)


def require_same_model(found: Survey, model: ModelConfig) -> None:
    """Raises ConfigError unless the weights found are those of a `model`."""
    theirs, ours = asdict(found.config), asdict(model)
    odd = [name for name in ours if name not in FREE and theirs[name] != ours[name]]
    if odd:
        told = "; ".join(f"model.{n} is {theirs[n]!r} there and {ours[n]!r} here" for n in odd)
        raise ConfigError(f"{found.path} does not hold the model of this recipe: {told}")
