"""A model folder as its headers describe it: complete, consistent, ours. No tensor data is read.

`survey` lists every problem it finds; `open_folder` raises on them. What stands in a folder:
config.json, one model.safetensors or an index with shards, and files that travel along.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from openk3._io import read_json
from openk3.checkpoint.hf.foreign import foreign_config, foreign_tensors
from openk3.checkpoint.hf.header import Entry, read_header
from openk3.checkpoint.hf.layout import (
    MX_BLOCK,
    Parameter,
    Slot,
    from_file,
    is_float32,
    parameters,
    to_file,
)
from openk3.config import ModelConfig
from openk3.errors import CheckpointError, ConfigError, nearest

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHOWN = 5
_FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Stack:
    """Where the tensors of one parameter lie."""

    parameter: Parameter
    packed: bool
    """MXFP4: `pieces` has weight_packed and weight_scale instead of weight."""
    pieces: dict[str, Sequence[Entry]]
    """Part to its tensors: one, or one per expert."""

    @property
    def stored_dtype(self) -> str:
        return "MXFP4" if self.packed else self.pieces["weight"][0].dtype


@dataclass
class Survey:
    """What a folder holds and what is wrong with it."""

    path: Path
    config: ModelConfig
    raw_config: dict[str, Any]
    entries: dict[str, Entry]
    """Every tensor by its name in the files."""
    stacks: dict[str, Stack] = field(default_factory=dict)
    """Every complete parameter by its name in the model."""
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Contradictions that no leniency excuses: shape, dtype, index, duplicates."""

    @property
    def complete(self) -> bool:
        return not (self.missing or self.unknown or self.wrong)

    @property
    def packed_experts(self) -> bool:
        """Whether any expert stack is MXFP4."""
        return any(stack.packed for stack in self.stacks.values())

    @property
    def shards(self) -> list[Path]:
        return sorted({entry.path for entry in self.entries.values()})


def open_folder(path: str | Path, *, strict: bool = True) -> Survey:
    """`survey` that raises CheckpointError unless everything is in order.

    strict=False excuses missing and unknown tensors, never contradictions.
    """
    return usable(survey(path), strict=strict)


def usable(found: Survey, *, strict: bool = True) -> Survey:
    """`found` itself; CheckpointError that lists its problems when it has any."""
    problems = [*found.wrong]
    if strict:
        problems += [f"missing: {name}" for name in found.missing]
        problems += [f"unknown: {name}" for name in found.unknown]
    if problems:
        more = len(problems) - _SHOWN
        lines = problems[:_SHOWN] + ([f"... and {more} more"] if more > 0 else [])
        raise CheckpointError(
            f"{found.path}: not a usable Kimi K3 checkpoint (`k3 inspect {found.path}` lists "
            "everything):\n  " + "\n  ".join(lines)
        )
    return found


def survey(path: str | Path) -> Survey:
    """Read config, index and every shard header of a folder, and compare them.

    Raises CheckpointError or ConfigError only where nothing can be listed: no folder, no readable
    config, no shards, a corrupt shard, or another model's layout (named).
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        why = "it has no config.json" if path.is_dir() else "it is no folder"
        raise CheckpointError(f"{path} is no model folder: {why}")
    raw = read_json(path / "config.json", CheckpointError)
    foreign = foreign_config(raw)
    if foreign:
        raise CheckpointError(
            f"{path}: {foreign}; this project reads Kimi K3 in MXFP4, BF16 or F32"
        )
    try:
        config = ModelConfig.from_hf(raw)
    except ConfigError as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from error
    wrong: list[str] = []
    entries = _read_entries(path, wrong)
    foreign = foreign_tensors(entries, {name: entry.dtype for name, entry in entries.items()})
    if foreign:
        raise CheckpointError(
            f"{path}: {foreign}; this project reads Kimi K3 in MXFP4, BF16 or F32"
        )
    return compare(Survey(path, config, raw, entries, wrong=wrong))


def compare(found: Survey) -> Survey:
    """Hold the entries against the config: fills stacks, missing, unknown and wrong.

    Raises CheckpointError for a config that asks for more layers than there are tensors.
    """
    _require_plausible(found)
    slots: dict[Slot, Entry] = {}
    forms: dict[str, Form] = {}
    for name, entry in found.entries.items():
        slot = from_file(name)
        if slot in slots:
            found.wrong.append(f"{name} and {slots[slot].name} are the same tensor")
        slots[slot] = entry
        forms.setdefault(slot.parameter, Form(slot.expert is not None, slot.part != "weight"))
    known: set[str] = set()
    for parameter in parameters(found.config):
        known.add(parameter.name)
        form = forms.get(parameter.name, Form(parameter.is_expert, parameter.is_expert))
        stack = _collect(parameter, form, slots, found)
        if stack is not None:
            found.stacks[parameter.name] = stack
    for number, (slot, entry) in enumerate(slots.items()):
        hint = nearest(slot.parameter, known) if number < _SHOWN else ""
        found.unknown.append(f"{entry.name}{hint} in {entry.path.name}")
    declared = found.config.quantization is not None
    has_experts = found.config.first_k_dense_replace < found.config.num_hidden_layers
    if found.stacks and has_experts and declared != found.packed_experts:
        found.wrong.append(
            f"config.json {'has a' if declared else 'has no'} quantization_config but the experts "
            f"are {'not ' if declared else ''}packed as MXFP4"
        )
    return found


def _require_plausible(found: Survey) -> None:
    """A config of nonsense must not make a billion names of missing tensors."""
    vision = found.config.vision
    num_layers = found.config.num_hidden_layers + (vision.vt_num_hidden_layers if vision else 0)
    if num_layers > len(found.entries):
        why = "".join(f"; {problem}" for problem in found.wrong[:_SHOWN])
        raise CheckpointError(
            f"{found.path}: config.json asks for {num_layers:,} layers (num_hidden_layers, "
            f"vt_num_hidden_layers), but the files hold only {len(found.entries):,} tensors{why}"
        )


class Form(NamedTuple):
    """How files hold a parameter."""

    per_expert: bool
    packed: bool


def _collect(
    parameter: Parameter, form: Form, slots: dict[Slot, Entry], found: Survey
) -> Stack | None:
    """Take the slots of one parameter out of `slots`; None when a tensor is missing or wrong."""
    complete = True
    pieces: dict[str, Sequence[Entry]] = {}
    most = len(found.entries) + 1  # of more experts than tensors, some are missing before that
    for part, experts, shape, dtypes in _expected(parameter, form):
        taken = []
        for expert in experts[:most]:
            entry = slots.pop(Slot(parameter.name, expert, part), None)
            if entry is None:
                found.missing.append(to_file(parameter.name, expert, part))
                complete = False
            elif problem := _mismatch(entry, shape, dtypes):
                found.wrong.append(problem)
                complete = False
            else:
                taken.append(entry)
        if len(experts) > most:
            found.missing.append(f"{len(experts) - most:,} more {part} of {parameter.name}")
        pieces[part] = taken
    return Stack(parameter, form.packed, pieces) if complete else None


Expected = tuple[str, Sequence[int | None], tuple[int, ...], tuple[str, ...]]


def _expected(parameter: Parameter, form: Form) -> Iterator[Expected]:
    """(part, experts, shape, allowed dtypes) of each group of tensors."""
    experts: Sequence[int | None] = range(parameter.shape[0]) if form.per_expert else (None,)
    shape = parameter.shape[1:] if form.per_expert else parameter.shape
    if form.packed:
        yield "weight_packed", experts, (*shape[:-1], shape[-1] // 2), ("U8",)
        yield "weight_scale", experts, (*shape[:-1], shape[-1] // MX_BLOCK), ("U8",)
    else:
        yield "weight", experts, shape, ("F32",) if is_float32(parameter.name) else _FLOATS


def _mismatch(entry: Entry, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str | None:
    where = f"{entry.path.name}: {entry.name}"
    if entry.dtype not in dtypes:
        return f"{where} is {entry.dtype}, expected {' or '.join(dtypes)}"
    padded = entry.name.endswith(".A_log") and len(entry.shape) == 1 and entry.shape >= shape
    if entry.shape != shape and not padded:
        return f"{where} has shape {list(entry.shape)}, config.json asks for {list(shape)}"
    return None


def _read_entries(path: Path, wrong: list[str]) -> dict[str, Entry]:
    index_path = path / INDEX
    if not index_path.exists():
        if (path / SINGLE).exists():
            return read_header(path / SINGLE)
        pickles = [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]
        raise CheckpointError(
            f"{path} has neither {SINGLE} nor {INDEX}"
            + (f"; {pickles[0].name} is a pickle, which is never loaded" if pickles else "")
        )
    weight_map = read_json(index_path, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: weight_map is missing or empty")
    for name, shard in weight_map.items():
        if not name.isprintable():
            raise CheckpointError(f"{index_path}: {name!r} is not the name of a tensor")
        if not _is_file_name(shard):
            raise CheckpointError(f"{index_path}: {name} points to {shard!r}, not a file name")
    counts = Counter(weight_map.values())
    entries: dict[str, Entry] = {}
    for shard in sorted(counts):
        if not (path / shard).exists():
            wrong.append(f"shard {shard} is missing ({counts.pop(shard)} tensors)")
            continue
        for name, entry in read_header(path / shard).items():
            if name in entries:
                wrong.append(f"{name} is in {entries[name].path.name} and again in {shard}")
            elif weight_map.get(name) != shard:
                wrong.append(f"{name} is in {shard}, the index says {weight_map.get(name)}")
            entries[name] = entry
    for name, shard in weight_map.items():
        if shard in counts and name not in entries:
            wrong.append(f"the index puts {name} into {shard}, which does not hold it")
    return entries


def _is_file_name(value: Any) -> bool:
    plain = isinstance(value, str) and value.isprintable() and "/" not in value
    return plain and value not in ("", ".", "..")
