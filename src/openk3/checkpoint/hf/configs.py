"""The small JSON files beside the weights."""

import copy
from typing import Any

from openk3.config import ModelConfig
from openk3.config.presets import PUBLISHED_QUANTIZATION


def published_config(
    config: ModelConfig, raw: dict[str, Any] | None, packed: bool, dtype: str
) -> dict[str, Any]:
    """config.json of a folder: `raw` where there is one, with what the tensors say."""
    if raw is None or "text_config" not in raw:
        raw = config.to_hf()
    raw = copy.deepcopy(raw)
    text = raw["text_config"]
    old = text.pop("quantization_config", None) or raw.get("quantization_config")
    raw.pop("quantization_config", None)
    if packed:
        text["quantization_config"] = old or PUBLISHED_QUANTIZATION
    raw["dtype"] = text["dtype"] = dtype
    return raw


def generation_config(config: ModelConfig) -> dict[str, Any]:
    """What the published generation_config.json says."""
    return {"max_length": config.max_position_embeddings, "eos_token_id": config.eos_token_id}
