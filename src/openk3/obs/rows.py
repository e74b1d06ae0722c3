"""The rows of `metrics.jsonl`, one dataclass per kind. docs/runs.md shows the file.

Every row carries the four x-axes a plot may want: step, tokens, FLOPs and wall time. `to_dict`
leaves out what is None; a float that is not finite becomes null, because JSON has no NaN.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

SCHEMA = 1
"""Version of the row format; it grows only when a field changes its meaning."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What every row says."""

    kind: ClassVar[str] = ""
    step: int
    """Optimizer steps done when the row was written; the first step of a run is 1."""
    tokens: int
    """Training tokens consumed since step 0, over all processes."""
    flops: float
    """Model FLOPs spent on them, forward and backward, without recomputation."""
    seconds: float
    """Wall time of training since step 0, summed over attempts."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict that starts with `kind`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        extra = fields.pop("extra", {})
        values = {name: value for name, value in fields.items() if value is not None}
        return {"kind": self.kind, **json_ready(values), **json_ready(extra)}


@dataclass(frozen=True, kw_only=True)
class StepRow(Row):
    """One optimizer step."""

    kind: ClassVar[str] = "step"
    loss: float
    """Mean cross-entropy of the step, nats per target token."""
    lr: float
    """Learning rate of the step (the schedule's value, before per-matrix scales)."""
    grad_norm: float
    """Global gradient norm before clipping."""
    step_seconds: float
    """Wall time of this step."""
    tokens_per_s: float
    """Training tokens per second of this step, over all processes."""
    bits_per_byte: float | None = None
    """The loss in bits per byte of the training text, where byte counts are known."""
    mfu: float | None = None
    """Fraction of the device's peak FLOP/s, where the peak is known."""
    memory_bytes: int | None = None
    """Peak memory of this process's device (resident set on CPU)."""
    memory_total_bytes: int | None = None
    """What the device has."""
    max_logit: float | None = None
    """Largest Gated MLA logit of the step, before weight clipping."""
    clipped_heads: int | None = None
    """MLA heads whose weights were clipped after the step."""
    bad: str | None = None
    """Why the step was skipped, or None when it was applied."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """More columns of one recipe; written beside the others."""


@dataclass(frozen=True, kw_only=True)
class EvalRow(Row):
    """One pass over held-out documents."""

    kind: ClassVar[str] = "eval"
    split: str
    """Name of the held-out set."""
    loss: float
    """Nats per target token."""
    bits_per_byte: float
    """Bits per byte of the original text."""
    num_tokens: int
    """Target tokens scored."""
    num_bytes: int
    """Bytes they stand for."""
    exact: float | None = None
    """Of documents with pictures: the share whose text was predicted to the last token."""


@dataclass(frozen=True, kw_only=True)
class BaselineRow(Row):
    """What another method reaches on the same held-out documents; a level line in the report."""

    kind: ClassVar[str] = "baseline"
    name: str
    """Whose number it is: `5-byte n-gram`, `xz -9e`."""
    bits_per_byte: float
    """Bits per byte of the original text."""


@dataclass(frozen=True, kw_only=True)
class BalanceRow(Row):
    """How evenly one layer used its experts since the last such row."""

    kind: ClassVar[str] = "balance"
    layer: int
    """0-based decoder layer."""
    load: Sequence[int]
    """Tokens each expert received, in expert order."""
    max_violation: float
    """max(load) / mean(load) - 1; 0 is perfect balance."""


@dataclass(frozen=True, kw_only=True)
class AttnResRow(Row):
    """Where each AttnRes mix reads from (K3 report §2.2)."""

    kind: ClassVar[str] = "attn_res"
    weights: Mapping[str, Sequence[float]]
    """Mean softmax weights by site: `layers.L.attn`, `layers.L.ffn` (0-based L) and `output`.

    Sources stand in bank order: the embedding, finished block sums, then the running prefix sum.
    """


@dataclass(frozen=True, kw_only=True)
class DecayRow(Row):
    """How fast one KDA layer forgets: a histogram of log-decays g over tokens and channels."""

    kind: ClassVar[str] = "decay"
    layer: int
    """0-based decoder layer."""
    edges: Sequence[float]
    """Bin edges of g, increasing, one more than there are counts."""
    counts: Sequence[int]
    """Values in each bin."""


@dataclass(frozen=True, kw_only=True)
class SampleRow(Row):
    """Text the model wrote."""

    kind: ClassVar[str] = "sample"
    prompt: str
    """What it was given."""
    text: str
    """What it added."""


@dataclass(frozen=True, kw_only=True)
class EventRow(Row):
    """Something that happened once: a checkpoint, a skipped step, an interrupt, the end."""

    kind: ClassVar[str] = "event"
    what: str
    """One word, greppable: checkpoint, skip, interrupt, done, ..."""
    detail: str = ""
    """One sentence for people."""


KINDS: dict[str, type[Row]] = {
    row.kind: row
    for row in (
        StepRow,
        EvalRow,
        BaselineRow,
        BalanceRow,
        AttnResRow,
        DecayRow,
        SampleRow,
        EventRow,
    )
}


def max_violation(load: Sequence[int]) -> float:
    """max(load) / mean(load) - 1, or 0 when nothing was routed."""
    total = sum(load)
    return max(load) * len(load) / total - 1.0 if total else 0.0


def json_ready(value: Any) -> Any:
    """`value` with tuples as lists and floats that are not finite as None, all the way down."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    return value
