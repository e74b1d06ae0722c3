"""A pre-training recipe: everything that fixes a run, as TOML or flags say it.

`[model] [data] [optim] [train]` decide the numbers a run computes; `[parallel]` decides which
process computes what, and `[run]` what is written, printed and kept. A checkpoint resumes only
under equal deciding sections, in any layout.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from openk3.config.check import at_least, require, require_seed
from openk3.config.model import ModelConfig
from openk3.config.presets import preset


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """What it reads."""

    train: tuple[str, ...] = ()
    """Dataset folders made by `k3 data build`; their `train` splits are mixed."""
    weights: tuple[float, ...] = ()
    """Sampling weight of each folder; empty means by size."""
    eval_split: str = "heldout"
    """Split of the first folder that evaluation reads; empty means no evaluation."""
    sequence_tokens: int = 512
    """Tokens of one packed row; documents in it do not see each other."""
    seed: int = 0
    """Order of the samples."""

    def __post_init__(self) -> None:
        at_least(self, 1, "sequence_tokens")
        for weight in self.weights:
            require(
                0 < weight < float("inf"),
                f"weights ({list(self.weights)}) must be positive numbers",
            )
        require_seed(self.seed)


@dataclass(frozen=True, kw_only=True)
class OptimRecipe:
    """How weights move (K3 report §2.5 and §3)."""

    lr: float = 4e-3
    """Peak learning rate, of Muon blocks (times 0.2 sqrt(max(rows, cols))) and of AdamW."""
    embed_lr_scale: float = 1.0
    """Factor on lr for the embedding and the output head."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; norms, gates' scalars and AttnRes queries have none."""
    warmup_fraction: float = 0.01
    """Share of the steps over which lr rises linearly (report §3: 1%)."""
    final_lr_fraction: float = 0.0
    """lr at the last step as a share of the peak; the way down is a half cosine."""
    momentum: float = 0.95
    """Nesterov momentum of Muon."""
    newton_schulz_steps: int = 5
    """Iterations of the orthogonalisation."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW decay rates of the first and second moment."""
    adam_eps: float = 1e-8
    """AdamW denominator floor."""
    clip_norm: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down. 0 turns it off."""
    logit_cap: float = 100.0
    """tau of the MLA weight clipping: heads whose largest logit exceeds it are scaled down."""

    def __post_init__(self) -> None:
        for name in ("lr", "adam_eps"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"{name} ({value}) must be positive and finite")
        for name in ("warmup_fraction", "final_lr_fraction", "momentum"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name} ({value}) must lie in [0, 1]")
        for beta in self.adam_betas:
            require(0 <= beta < 1, f"adam_betas {self.adam_betas} must lie in [0, 1)")
        at_least(self, 0, "embed_lr_scale", "weight_decay", "clip_norm")
        at_least(self, 1, "newton_schulz_steps")
        require(self.logit_cap > 0, f"logit_cap ({self.logit_cap}) must be positive")


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """How long and how wide."""

    steps: int = 1000
    """Optimizer steps of the whole run."""
    batch_sequences: int = 2
    """Sequences per optimizer step over all processes."""
    micro_sequences: int = 0
    """Sequences per forward of one process; 0 means its whole share. Fewer means accumulation."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of products: float32, bfloat16, or auto (bfloat16 on a GPU, float32 on a CPU)."""
    start_from: str = ""
    """Folder of a model or of another run whose weights it starts from; empty: random ones."""
    seed: int = 0
    """Initial weights, and the random numbers of every step and sample."""
    spike_nats: float = 2.0
    """A step whose loss exceeds the running mean by this much is skipped."""
    max_bad_steps: int = 10
    """Bad steps in a row after which the run stops."""

    def __post_init__(self) -> None:
        at_least(self, 1, "steps", "batch_sequences", "max_bad_steps")
        at_least(self, 0, "micro_sequences", "spike_nats")
        require_seed(self.seed)


@dataclass(frozen=True, kw_only=True)
class ParallelRecipe:
    """How the processes share a run; rounding aside, none of it changes a number.

    Without `zero` every process holds everything and only the rows are shared.
    """

    zero: int = 0
    """Shard over processes: 1 optimizer state, 2 gradients too, 3 parameters too; 0 nothing."""
    shard: int = 0
    """Processes over which one copy of the state is sharded; 0 means all that the others leave."""
    replicate: int = 1
    """Copies of the sharded state."""
    expert: int = 1
    """Processes over which the routed experts are divided; they are taken from shard x context."""
    balance_experts: bool = True
    """Give each of them equally many rows, whatever the router does; false: plain all-to-all."""
    pipeline: int = 1
    """Pipeline stages."""
    context: int = 1
    """Processes that share one sequence."""
    tensor: int = 1
    """Processes that share one matrix product."""

    def __post_init__(self) -> None:
        require(self.zero in range(4), f"zero ({self.zero}) must be 0, 1, 2 or 3")
        at_least(self, 0, "shard")
        at_least(self, 1, "replicate", "expert", "pipeline", "context", "tensor")
        for name in ("shard", "replicate", "expert") if self.zero == 0 else ():
            value = getattr(self, name)
            require(
                value <= 1,
                f"{name} ({value}) needs zero 1, 2 or 3: with 0 every process holds everything",
            )


@dataclass(frozen=True, kw_only=True)
class RunRecipe:
    """What a run writes and prints; none of it changes the numbers it computes."""

    folder: str = ""
    """Run folder; empty means runs/NAME-of-the-recipe."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto (a GPU when torch sees one)."""
    threads: int = 0
    """CPU threads; 0 leaves torch's choice."""
    stop_after: int = 0
    """Save and stop after this step, to go on with --resume auto; 0 means not before the last."""
    checkpoint_every: int = 200
    """Steps between checkpoints; 0 writes only the last."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept; 0 keeps all."""
    eval_every: int = 200
    """Steps between evaluations; 0 evaluates only at the end."""
    eval_tokens: int = 65536
    """Held-out tokens of an evaluation on the way; 0 reads the whole split."""
    final_eval_tokens: int = 0
    """Held-out tokens of the last evaluation; 0 reads the whole split."""
    sample_every: int = 0
    """Steps between samples; 0 samples only at the end."""
    sample_prompts: tuple[str, ...] = ("def ", "The ")
    """What the samples continue."""
    sample_tokens: int = 96
    """Tokens of a sample."""
    observe_every: int = 50
    """Steps between rows about experts, AttnRes weights and decay; 0 turns them off."""
    hang_seconds: float = 600
    """With several processes: time without progress after which the run ends and says why."""
    trackers: tuple[str, ...] = ()
    """Send metrics there too: wandb, trackio, tensorboard."""

    def __post_init__(self) -> None:
        at_least(self, 0, "threads", "stop_after", "checkpoint_every", "keep_checkpoints")
        at_least(self, 0, "eval_every", "eval_tokens", "final_eval_tokens")
        at_least(self, 0, "sample_every", "sample_tokens", "observe_every")
        at_least(self, 1, "hang_seconds")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One pre-training run."""

    model: ModelConfig = field(default_factory=lambda: preset("nano"))
    """Which model: `preset = "nano"` and the fields that differ from it."""
    data: DataRecipe = DataRecipe()
    """Which data."""
    optim: OptimRecipe = OptimRecipe()
    """Which optimizer."""
    train: TrainRecipe = TrainRecipe()
    """How long and how wide."""
    parallel: ParallelRecipe = ParallelRecipe()
    """Which process computes what."""
    run: RunRecipe = RunRecipe()
    """Where and how it is watched."""

    def deciding(self) -> dict[str, Any]:
        """The sections that decide the computed numbers, flat: `optim.lr` -> value.

        Dataset folders count by their content (the loader's fingerprint), not by their path; a
        model to start from is read before step 1 only. How a batch is cut over processes and
        micro-batches decides nothing but rounding.
        """
        sections = dataclasses.asdict(self)
        del sections["train"]["micro_sequences"], sections["train"]["start_from"]
        del sections["run"], sections["parallel"], sections["data"]["train"]
        return flatten(sections)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`, tuples as lists: what JSON gives back unchanged."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat
