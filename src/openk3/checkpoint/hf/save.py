"""Writes weights, from a model or another folder, as a model folder.

Two layouts: published (one matrix per expert, the names of the real files) and stacked (the model's
own names, one tensor per stack of experts). In both, what a model holds as one stack lies side by
side in the files, so that loading can map it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional as F

from openk3.checkpoint.hf.configs import generation_config, published_config
from openk3.checkpoint.hf.layout import (
    MX_BLOCK,
    Parameter,
    Tensor,
    from_file,
    is_float32,
    padded_heads,
    parameters,
    published_parts,
    stacked_name,
    to_file,
)
from openk3.checkpoint.hf.model_source import ModelSource, loaded_from
from openk3.checkpoint.hf.read import DTYPES
from openk3.checkpoint.hf.source import Source
from openk3.checkpoint.hf.write import Job, Produced, write_folder
from openk3.config import ModelConfig
from openk3.errors import InputError
from openk3.model import K3
from openk3.ops import mx

RANKS = "expert_ranks.json"
Layout = Literal["published", "stacked"]


@dataclass(frozen=True)
class Target:
    """How weights are to be stored."""

    layout: Layout = "published"
    mxfp4_experts: bool = False
    dtype: str | None = None
    """BF16 or F32 for every weight that is not always F32; None keeps each one's own."""
    expert_ranks: int = 1
    """Shards are cut so that each of this many ranks has files of its own experts."""
    max_shard_bytes: float = 5e9


def save(
    model: K3, path: str | Path, *, mxfp4_experts: bool = False, max_shard_bytes: float = 5e9
) -> None:
    """Write `model` as a new folder in the published layout: shards, index, config files.

    Weights keep their dtype (bfloat16, float16 or float32); mxfp4_experts=True packs the routed
    experts, False writes packed ones as bfloat16. Shards are cut at `max_shard_bytes`. Tokenizer
    files are copied from the folder the model was loaded from. The folder appears whole or not at
    all. Raises InputError for a folder in use, or naming a weight that is not finite or that MXFP4
    would make infinite; StorageError when the disk is full.
    """
    target = Target(mxfp4_experts=mxfp4_experts, max_shard_bytes=max_shard_bytes)
    companions = loaded_from(model)
    write_weights(ModelSource(model), model.config, path, target, companions=companions)


def write_weights(
    source: Source,
    config: ModelConfig,
    path: str | Path,
    target: Target,
    *,
    raw_config: dict[str, Any] | None = None,
    companions: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write every parameter of `config` from `source` into the new folder `path`.

    raw_config is a config.json whose inert keys are kept; companions a folder whose tokenizer and
    generation files travel along. Raises as `save` does.
    """
    common: list[Tensor] = []
    ranks: list[list[Tensor]] = [[] for _ in range(target.expert_ranks)]
    jobs: list[Job] = []
    for parameter in parameters(config):
        for tensor in _tensors(parameter, source, target):
            expert = from_file(tensor.name).expert
            if expert is None or target.expert_ranks == 1:
                common.append(tensor)
            else:
                ranks[expert * target.expert_ranks // config.num_experts].append(tensor)
        jobs.extend(_jobs(parameter, source, target))

    def extra(weight_map: dict[str, str]) -> dict[str, Any]:
        files: dict[str, Any] = {"generation_config.json": generation_config(config)}
        if target.expert_ranks > 1:
            files[RANKS] = {
                "common": _shards(common, weight_map),
                "ranks": [_shards(group, weight_map) for group in ranks],
            }
        return files

    dtype = "float32" if common[0].dtype == "F32" else "bfloat16"
    write_folder(
        path,
        [common, *ranks],
        jobs,
        config=published_config(config, raw_config, target.mxfp4_experts, dtype),
        companions=companions,
        max_shard_bytes=target.max_shard_bytes,
        extra=extra,
        progress=progress,
    )


def planned_bytes(source: Source, config: ModelConfig, target: Target) -> int:
    """Tensor bytes that `write_weights` would write."""
    return sum(
        tensor.num_bytes
        for parameter in parameters(config)
        for tensor in _tensors(parameter, source, target)
    )


def _tensors(parameter: Parameter, source: Source, target: Target) -> list[Tensor]:
    """What one parameter becomes in the files, in file order."""
    packed = target.mxfp4_experts and parameter.is_expert
    if packed and parameter.shape[-1] % mx.BLOCK:
        raise InputError(
            f"{parameter.name} has rows of {parameter.shape[-1]} values; MXFP4 needs a multiple of "
            f"{mx.BLOCK}"
        )
    dtype = _target_dtype(parameter, source, target)
    if target.layout == "published" or not parameter.is_expert:
        parts = list(published_parts(parameter, mxfp4_experts=packed))
        parts = [t if t.dtype in ("U8", "F32") else t._replace(dtype=dtype) for t in parts]
        if target.layout == "stacked":
            parts = [Tensor(parameter.name, parameter.shape, dtype)]
        return parts
    *lead, columns = parameter.shape
    if not packed:
        return [Tensor(parameter.name, parameter.shape, dtype)]
    return [
        Tensor(stacked_name(parameter.name, "weight_packed"), (*lead, columns // 2), "U8"),
        Tensor(stacked_name(parameter.name, "weight_scale"), (*lead, columns // MX_BLOCK), "U8"),
    ]


def _jobs(parameter: Parameter, source: Source, target: Target) -> Iterator[Job]:
    """The work that produces them: one piece for each expert, or one."""
    dtype = DTYPES[_target_dtype(parameter, source, target)]
    if not parameter.is_expert:
        yield lambda: [_whole(parameter, source, target, dtype)]
        return
    produce = _packed_expert if target.mxfp4_experts else _dense_expert
    for expert in range(parameter.shape[0]):
        yield lambda expert=expert: produce(parameter, expert, source, target, dtype)


def _whole(parameter: Parameter, source: Source, target: Target, dtype: torch.dtype) -> Produced:
    value = require_finite(source.values(parameter), source.where(parameter)).to(dtype)
    if target.layout == "stacked":
        return Produced(parameter.name, value)
    if parameter.name.endswith(".A_log"):
        value = F.pad(value, (0, padded_heads(value.numel()) - value.numel()))
    return Produced(to_file(parameter.name), value)


def _dense_expert(
    parameter: Parameter, expert: int, source: Source, target: Target, dtype: torch.dtype
) -> list[Produced]:
    value = require_finite(source.values(parameter, expert), source.where(parameter, expert))
    return [_place(parameter, expert, "weight", value.to(dtype), target)]


def _packed_expert(
    parameter: Parameter, expert: int, source: Source, target: Target, dtype: torch.dtype
) -> list[Produced]:
    name = source.where(parameter, expert)
    if source.stored(parameter) == "MXFP4":
        data, scale = source.packed(parameter, expert)
        mx.check_finite_blocks(data, scale, name)
    else:
        data, scale = mx.quantize_weight(source.values(parameter, expert), name)
    return [
        _place(parameter, expert, "weight_packed", data, target),
        _place(parameter, expert, "weight_scale", scale, target),
    ]


def _place(
    parameter: Parameter, expert: int, part: str, value: torch.Tensor, target: Target
) -> Produced:
    if target.layout == "stacked":
        return Produced(stacked_name(parameter.name, part), value, expert)
    return Produced(to_file(parameter.name, expert, part), value)


def _target_dtype(parameter: Parameter, source: Source, target: Target) -> str:
    if is_float32(parameter.name):
        return "F32"
    stored = source.stored(parameter)
    return target.dtype or ("BF16" if stored == "MXFP4" else stored)


def _shards(tensors: list[Tensor], weight_map: dict[str, str]) -> list[str]:
    return sorted({weight_map[tensor.name] for tensor in tensors})


def require_finite(value: torch.Tensor, name: str) -> torch.Tensor:
    """`value` itself; InputError that names it when it holds NaN or infinity."""
    if not bool(value.isfinite().all()):
        raise InputError(f"{name} holds NaN or infinite values; only finite weights are exported")
    return value
