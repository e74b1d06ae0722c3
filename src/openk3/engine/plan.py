"""What the scheduler tells a runner to do in one step, and what a runner answers.

Memory is one pool of equal pages with ids 0 .. num_pages - 1. The layers are dealt into groups of
one kind; a page id stands for one page in every layer of the group that holds it. A sequence has a
list of pages for the MLA group (its latents, page_tokens to a page) and one page for each KDA group
(its live state). A checkpoint is one page for each KDA group: read-only, at a known position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from openk3.engine.types import EngineConfig, Request, TokenLogprobs

Tier = Literal["pool", "host"]
UNKNOWN = -1
"""A token that the runner knows and the host not yet: what the step before chose for this slot, or
a guess that the runner is to make itself."""


@dataclass(frozen=True)
class Geometry:
    """How a model's memory is cut into pages."""

    page_tokens: int
    page_bytes: int
    """Of one layer."""
    num_pages: int
    kda_groups: int
    """KDA pages a sequence, and a checkpoint, take."""
    layers_per_group: int

    @property
    def id_bytes(self) -> int:
        """What one page id stands for: a page in every layer of a group."""
        return self.page_bytes * self.layers_per_group


def num_host_pages(geometry: Geometry, config: EngineConfig) -> int:
    """Page ids of the host tier: 0 .. this - 1, a space of their own."""
    return config.host_bytes // geometry.id_bytes


@dataclass(frozen=True)
class Prompt:
    """A prompt as the memory sees it: one id for each position."""

    ids: tuple[int, ...]
    """Each picture's id is repeated once for each vector the picture takes."""
    media: tuple[tuple[int, int], ...] = ()
    """(first position, positions) of each picture, in the order of `Media.digests`."""


@dataclass(frozen=True)
class Copy:
    """Bytes of one page id to another, over all layers of its group."""

    source: int
    target: int
    source_tier: Tier = "pool"
    target_tier: Tier = "pool"


@dataclass(frozen=True)
class Checkpoint:
    """Where the state after `position` tokens of a sequence is to be kept."""

    position: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """The part of one sequence that advances in this step."""

    request: Request
    slot: int
    """0 .. max_running - 1, the sequence's own while it runs: row of a runner's buffers."""
    token_ids: tuple[int, ...]
    """New inputs, of the expanded prompt (see `Prompt`) and the output; the last `num_drafts` are
    guesses to be verified, or UNKNOWN where a draft layer makes them. (UNKNOWN,) in a step that is
    launched before the last has ended."""
    start: int
    """Position of the first, = tokens whose memory the pages hold already."""
    latent_pages: tuple[int, ...]
    """MLA pages that hold positions 0 .. start + len(token_ids) - 1."""
    state_pages: tuple[int, ...]
    """The live state, one page a KDA group; what they hold at start 0 must not be read."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Wanted of this pass, at positions start .. start + num_known. The one at `start` is
    taken before the pass; a state among drafts can never be asked for."""
    num_drafts: int = 0
    output_ids: Sequence[int] = ()
    """What the request has generated so far, for penalties (drafts not included). The engine's
    own list: read it during the step, do not keep it."""
    samples: bool = True
    """Whether the last token is the sequence's last known one, so that a next one is chosen."""

    @property
    def num_known(self) -> int:
        """Tokens that are no guesses."""
        return len(self.token_ids) - self.num_drafts

    @property
    def end(self) -> int:
        """Position behind the last token, guess or not."""
        return self.start + len(self.token_ids)

    @property
    def drafts(self) -> tuple[int, ...]:
        """The guesses."""
        return self.token_ids[self.num_known :]

    @property
    def inner_checkpoints(self) -> list[Checkpoint]:
        """Those strictly inside: a pass over the chunk has to stop there."""
        return [point for point in self.checkpoints if self.start < point.position < self.end]

    def scored(self) -> tuple[int, ...]:
        """Ids of the prompt behind each token of the chunk, if their odds are asked for."""
        if self.request.params.prompt_logprobs is None or self.output_ids:
            return ()
        return self.request.prompt_ids[self.start + 1 : self.end + 1]


@dataclass(frozen=True)
class StepPlan:
    """One forward pass. Poison first, then the copies in order, then the chunks."""

    chunks: tuple[Chunk, ...]
    copies: tuple[Copy, ...] = ()
    poison: tuple[int, ...] = ()
    """Pages to fill with NaN (debug)."""


@dataclass(frozen=True)
class ChunkResult:
    """New ids of a chunk: the drafts that were accepted, and one more; () if it does not sample."""

    new_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """If asked for, of the prompt's tokens at positions start + 1 .. start + len(token_ids)."""
    error: str | None = None
    """This request cannot go on (its logits are not finite); others are not concerned."""


Results = Callable[[], Sequence[ChunkResult]]
"""Waits for a step that was launched: one result for each chunk, in order."""


class Runner(Protocol):
    """Runs steps. The one for models is `openk3.engine.runner`; tests script their own."""

    geometry: Geometry
    vocab_size: int
    end_id: int
    max_positions: int
    runs_beside_host: bool
    """Whether a step that was launched computes while the host does something else."""

    def warm_up(self) -> bool:
        """What would make first steps slow, in advance, while nothing runs. Whether prompts of
        several lengths would still meet something for the first time."""
        ...

    def run(self, plan: StepPlan) -> Sequence[ChunkResult]:
        """One result for each chunk, in order. Checkpoints have landed when it returns."""
        ...

    def launch(self, plan: StepPlan) -> Results:
        """Start a step behind those launched before, whose results may not have been asked for."""
        ...

    def forget(self, slot: int) -> None:
        """The sequence of a slot is gone, or starts over (preemption)."""
        ...

    def expand(self, request: Request) -> Prompt:
        """Called once for each request with media, before its first chunk. InputError if the ids
        and the pictures do not fit."""
        ...

    def drop_host(self) -> None:
        """Give the host tier's memory back; it may be taken again by a later copy."""
        ...

    def read_host(self, pages: Sequence[int]) -> bytes:
        """What host pages hold, in order, between two steps."""
        ...

    def write_host(self, pages: Sequence[int], data: bytes) -> None:
        """Fill host pages with what `read_host` gave."""
        ...

    def fingerprint(self) -> str:
        """Names the model and its weights: memories of another are not mistaken for its own."""
        ...
