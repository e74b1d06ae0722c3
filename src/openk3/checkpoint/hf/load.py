"""Loads a model folder: validated as a whole first, then filled tensor by tensor.

A tensor whose dtype need not change is a view of its mapped file; others are converted in small
pieces by several threads, so that memory beyond the model itself stays at a few MiB.
"""

import resource
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from openk3._io import derive_seed
from openk3.checkpoint.experts.packed import PackedExperts
from openk3.checkpoint.experts.streamed import attach
from openk3.checkpoint.hf.folder import Stack, Survey, open_folder
from openk3.checkpoint.hf.layout import EXPERT_MATRICES, is_float32, parameters
from openk3.checkpoint.hf.model_source import remember_folder
from openk3.checkpoint.hf.read import (
    DTYPES,
    FileReader,
    adjoining,
    allocate_lasting,
    run_jobs,
)
from openk3.checkpoint.hf.source import unpad_heads
from openk3.config import ModelConfig
from openk3.errors import CheckpointError, InputError
from openk3.model import K3
from openk3.model.init import init_weights
from openk3.obs.free_memory import free_memory
from openk3.ops import mx

ExpertForm = Literal["dequant", "packed", "stream"]
_FORMS = ("dequant", "packed", "stream")
_UNKNOWN_FREE = 8 << 30
"""Bytes that are taken to be free where the system does not tell."""
_FLOATS = (None, torch.float32, torch.bfloat16, torch.float16)
Job = Callable[[], int]


def load(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    experts: ExpertForm = "dequant",
    strict: bool = True,
    expert_cache_gb: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> K3:
    """A model from a folder in the published layout (or stacked), in evaluation mode.

    dtype: float32, bfloat16 or float16; None keeps what is stored (bfloat16 for MXFP4). It never
    touches A_log, dt_bias, convolutions, o_norm and the router bias, which stay float32.
    experts: "dequant" makes MXFP4 experts ordinary weights; "packed" keeps them 4-bit in memory;
    "stream" leaves experts on disk behind a cache of `expert_cache_gb` (10^9 bytes; default a
    quarter of the memory that is free), so that the model may be larger than memory.
    strict=False fills missing tensors with initial weights and ignores unknown ones.
    progress is called with numbers of file bytes as they are done.

    On the CPU, weights that keep their dtype are private mappings of the files: writing to them
    never changes a file, but the files must not be truncated while the model lives. Raises
    CheckpointError or ConfigError naming file and tensor; then there is no half-loaded model.
    """
    with torch.inference_mode(False):  # weights must be ordinary tensors wherever load is called
        return _load(path, torch.device(device), dtype, experts, strict, expert_cache_gb, progress)


def _load(
    path: str | Path,
    device: torch.device,
    dtype: torch.dtype | None,
    experts: ExpertForm,
    strict: bool,
    cache_gb: float | None,
    progress: Callable[[int], None] | None,
) -> K3:
    if experts not in _FORMS or dtype not in _FLOATS:
        raise InputError(f"experts is {experts!r} (allowed: {', '.join(_FORMS)}), dtype {dtype}")
    found = open_folder(path, strict=strict)
    mapped = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    reader = FileReader(mapped=mapped)
    model = empty_model(found.config)
    if experts == "packed":
        _attach_packed(model, found)
    elif experts == "stream":
        _require_experts(found)
        attach(model, found, reader, _cache_bytes(cache_gb))
    _fill(model, found, reader, device, dtype, progress)
    if experts != "stream":
        reader.close()
    remember_folder(model, found.path)
    return model.eval()


class _EmptyIsMeta(TorchFunctionMode):
    """Uninitialised tensors, which is what parameters begin as, take no memory; buffers do.

    The random initialisation of torch's own modules is left out: on meta tensors it does nothing,
    but imports a good part of torch for seconds.
    """

    INITIALISERS = ("normal_", "uniform_", "kaiming_uniform_")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        if getattr(func, "__name__", "") in self.INITIALISERS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def empty_model(config: ModelConfig) -> K3:
    """A K3 whose parameters are on the meta device, waiting to be assigned."""
    with _EmptyIsMeta():
        return K3(config, seed=None)


def _fill(
    model: K3,
    found: Survey,
    reader: FileReader,
    device: torch.device,
    dtype: torch.dtype | None,
    progress: Callable[[int], None] | None,
) -> None:
    """Assign every parameter and persistent buffer that the model still has."""
    names = list(model.state_dict())
    pending: list[tuple[str, Tensor]] = []
    jobs: list[Job] = []
    for name in names:
        tensor, work = _plan(name, found, reader, dtype)
        pending.append((name, tensor))
        jobs.extend(work)
        if device.type != "cpu":  # one tensor at a time on the way to the device
            run_jobs(jobs, progress=progress)
            pending[-1] = (name, tensor.to(device))
            jobs = []
    run_jobs(jobs, progress=progress)
    for name, tensor in pending:
        stack = found.stacks.get(name)
        assign(model, name, unpad_heads(tensor, stack.parameter) if stack else tensor)
    model.to(device)


def _plan(
    name: str, found: Survey, reader: FileReader, dtype: torch.dtype | None
) -> tuple[Tensor, Iterable[Job]]:
    """The tensor of one name of the state dict, and the work that is left to fill it."""
    if name.endswith(("_packed", "_scale")):  # buffers of PackedExperts
        parameter, part = name.rsplit("_", 1)
        return _copy(found.stacks[parameter], f"weight_{part}", reader, None)
    if name not in found.stacks:
        return _initial(name, found, dtype), ()
    stack = found.stacks[name]
    if is_float32(name):
        dtype = torch.float32
    if not stack.packed:
        return _copy(stack, "weight", reader, dtype)
    out = allocate_lasting(stack.parameter.shape, dtype or torch.bfloat16)
    packed, scale = stack.pieces["weight_packed"], stack.pieces["weight_scale"]
    stacked = out if len(packed) > 1 else out[None]
    jobs: list[Job] = []
    for run, (data, codes) in adjoining(packed, scale):
        jobs.extend(reader.dequantise_jobs(data, codes, stacked[run]))
    return out, jobs


def _copy(
    stack: Stack, part: str, reader: FileReader, dtype: torch.dtype | None
) -> tuple[Tensor, Iterable[Job]]:
    """A view of the file where nothing has to change, else memory and the work to fill it."""
    entries = stack.pieces[part]
    stored = DTYPES[entries[0].dtype]
    same = all(entry.dtype == entries[0].dtype for entry in entries)
    if same and dtype in (None, stored) and (view := reader.view(entries)) is not None:
        return view, ()
    shape = entries[0].shape if len(entries) == 1 else (len(entries), *entries[0].shape)
    out = allocate_lasting(shape, dtype or stored)
    stacked = out if len(entries) > 1 else out[None]
    jobs: list[Job] = []
    for run, (entry,) in adjoining(entries):
        jobs.extend(reader.copy_jobs(entry, stacked[run]))
    return out, jobs


def _initial(name: str, found: Survey, dtype: torch.dtype | None) -> Tensor:
    """Initial weights of a tensor that the folder lacks (strict=False)."""
    shapes = {parameter.name: parameter.shape for parameter in parameters(found.config)}
    if name not in shapes:
        raise CheckpointError(f"{found.path}: {name} has no place in the published layout")
    value = torch.zeros(shapes[name])
    if not name.endswith("e_score_correction_bias"):
        seed = derive_seed(0, name)
        init_weights(_OneParameter(name, value), found.config.initializer_range, seed)
    return value if is_float32(name) else value.to(dtype or torch.bfloat16)


class _OneParameter(nn.Module):
    """A tensor under a full parameter name, which is what decides its initial distribution."""

    def __init__(self, name: str, value: Tensor) -> None:
        super().__init__()
        self._pair = name, value

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield self._pair


def assign(model: nn.Module, name: str, value: Tensor) -> None:
    """Put `value` in the place of a parameter or buffer."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(value)
    else:
        module._buffers[leaf] = value


def _attach_packed(model: K3, found: Survey) -> None:
    for index, layer in enumerate(model.layers):
        if not hasattr(layer, "block_sparse_moe"):
            continue
        stacks = {}
        for matrix in EXPERT_MATRICES:
            name = f"layers.{index}.block_sparse_moe.experts.{matrix}"
            stack = found.stacks.get(name)
            if stack is None or not stack.packed:
                raise InputError(
                    f"{found.path}: {name} is not stored as MXFP4, so experts='packed' cannot "
                    "keep it packed; convert the folder first (k3 convert --experts mxfp4)"
                )
            # placeholders: filled like every other tensor
            stacks[matrix] = mx.Quantized(torch.empty(0), torch.empty(0))
        layer.block_sparse_moe.experts = PackedExperts(found.config, stacks)


def _require_experts(found: Survey) -> None:
    lost = [p.name for p in parameters(found.config) if p.is_expert and p.name not in found.stacks]
    if lost:
        raise CheckpointError(f"{found.path}: experts cannot be streamed, {lost[0]} is incomplete")


def _cache_bytes(gigabytes: float | None) -> float:
    if gigabytes is not None:
        return gigabytes * 1e9
    return (free_memory() or _UNKNOWN_FREE) / 4
