"""Conversion between layouts and number formats, one tensor at a time, and its proof by logits."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from openk3._io import read_json
from openk3.checkpoint.bridge import open_model, source_of
from openk3.checkpoint.hf.folder import Survey
from openk3.checkpoint.hf.layout import is_float32
from openk3.checkpoint.hf.load import load
from openk3.checkpoint.hf.read import FileReader
from openk3.checkpoint.hf.save import RANKS, Target, planned_bytes, write_weights
from openk3.checkpoint.trained import is_training_output, load_trained
from openk3.errors import CheckpointError, InputError

_BITS = {"MXFP4": 0, "F16": 2, "BF16": 2, "F32": 3}


@dataclass(frozen=True)
class Verdict:
    """How far the logits of two folders lie apart, over some random tokens."""

    max_difference: float
    """Largest absolute difference of a logit."""
    kl: float
    """Mean KL divergence of the next-token distributions, in nats."""
    same_choice: float
    """Share of positions where both prefer the same token."""
    num_tokens: int


def convert(
    source: str | Path,
    target: str | Path,
    how: Target,
    *,
    progress: Callable[[int], None] | None = None,
) -> Survey:
    """Write the model `source` anew as the folder `target`, stored as `how` says.

    The source is a model folder, a training run or one of its checkpoints. Works tensor by tensor,
    so memory stays at a few tensors whatever the size of the model. Tokenizer, generation and
    processor files and inert config keys travel along. Returns what the source holds. Raises
    CheckpointError for a bad source, InputError for a target in use or for weights that cannot be
    stored that way, StorageError when the disk is full.
    """
    found, companions = open_model(source)
    check(found, how)
    with FileReader(mapped=False) as reader:
        write_weights(
            source_of(found, reader),
            found.config,
            target,
            how,
            raw_config=found.raw_config,
            companions=companions,
            progress=progress,
        )
    return found


def check(found: Survey, how: Target) -> int:
    """Bytes that converting would write. Raises InputError where it cannot be done."""
    if how.expert_ranks < 1 or how.expert_ranks > found.config.num_experts:
        raise InputError(
            f"expert_ranks is {how.expert_ranks}; allowed: 1 to {found.config.num_experts} "
            "(num_experts)"
        )
    if how.expert_ranks > 1 and how.layout == "stacked":
        raise InputError(
            "the stacked layout keeps a layer's experts in one tensor; it has no ranks"
        )
    with FileReader(mapped=False) as reader:
        return planned_bytes(source_of(found, reader), found.config, how)


def lossless(found: Survey, how: Target) -> bool:
    """Whether every value of a folder survives being stored as `how` says."""
    for name, stack in found.stacks.items():
        old = stack.stored_dtype
        if is_float32(name):
            continue
        if stack.parameter.is_expert and how.mxfp4_experts:
            new = "MXFP4"
        else:
            new = how.dtype or ("BF16" if old == "MXFP4" else old)
        if new != old and _BITS[new] <= _BITS[old]:
            return False
    return True


@torch.inference_mode()
def verify(a: str | Path, b: str | Path, *, num_tokens: int = 48, seed: int = 0) -> Verdict:
    """Run the same random tokens through two folders, one after the other, in float32.

    Experts of model folders are streamed, so each needs memory for its other weights only.
    """
    first = _logits(a, num_tokens, seed)
    second = _logits(b, num_tokens, seed)
    log_p, log_q = F.log_softmax(first, -1), F.log_softmax(second, -1)
    return Verdict(
        max_difference=float((first - second).abs().max()),
        kl=float(F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")),
        same_choice=float((first.argmax(-1) == second.argmax(-1)).double().mean()),
        num_tokens=num_tokens,
    )


def _logits(path: str | Path, num_tokens: int, seed: int) -> torch.Tensor:
    if is_training_output(path):
        model = load_trained(path).model
    else:
        model = load(path, dtype=torch.float32, experts="stream")
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (1, num_tokens), generator=rng)
    return model(ids)[0].float()


def files_of_rank(path: str | Path, rank: int) -> list[Path]:
    """The shards that one expert-parallel rank has to read of a folder converted for ranks."""
    table_path = Path(path) / RANKS
    if not table_path.exists():
        raise CheckpointError(f"{table_path} is missing; convert the folder with --expert-ranks")
    table = read_json(table_path, CheckpointError)
    if not 0 <= rank < len(table["ranks"]):
        raise InputError(f"rank is {rank}; {path} was cut for {len(table['ranks'])} ranks")
    return [Path(path) / name for name in [*table["common"], *table["ranks"][rank]]]
