"""What goes into the engine and what comes out (no torch: the HTTP layer shares these)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from numbers import Integral, Real
from typing import Any, Literal, Protocol

from openk3.errors import ConfigError, InputError

FinishReason = Literal["stop", "length", "abort", "error"]


class Constraint(Protocol):
    """A grammar that follows one request. Token ids are the model's."""

    def allowed(self) -> Any | None:
        """bool [vocab] tensor of the ids that may come next; None while everything may."""
        ...

    def accept(self, token_id: int) -> None:
        """Move on by a token that was chosen."""
        ...


PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens. Raises InputError on a value out of range."""

    max_tokens: int = 128
    """New tokens at most; the context limit may end a request earlier."""
    temperature: float = 1.0
    """0 takes the likeliest."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with this probability."""
    top_k: int = 0
    """Keep this many tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of a token that was generated."""
    frequency_penalty: float = 0.0
    """Subtracted for each time a token was generated."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these ids."""
    logprobs: int | None = None
    """How many alternatives to report with each token; None reports no probabilities."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from the second on; the prompt is then computed whole."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end a request (they are the last of its output), besides the model's end id."""
    ignore_eos: bool = False
    """The model's end id does not end the request."""
    seed: int | None = None
    """Of the request's own generator; None takes one from the engine's seed and the request id."""

    @property
    def penalises(self) -> bool:
        """Whether scores depend on which tokens came before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "logprobs", "prompt_logprobs", "seed"):
            self._require(name, Integral, "an integer")
        for name in ("temperature", "top_p", "min_p", *PENALTIES):
            self._require(name, Real, "a number")
        for name, good, allowed in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "finite and at least 0"),
            ("top_p", 0 < self.top_p <= 1, "within (0, 1]"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("min_p", 0 <= self.min_p <= 1, "within [0, 1]"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "within [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "within [-2, 2]"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 10, "within (0, 10]"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 64, "within [0, 64]"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 64,
                "within [0, 64]",
            ),
            ("logit_bias", all(map(isfinite, self.logit_bias.values())), "finite"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
        ):
            if not good:
                raise InputError(f"{name} must be {allowed}, not {getattr(self, name)}")

    def _require(self, name: str, kind: type, said: str) -> None:
        value = getattr(self, name)
        missing = value is None and getattr(type(self), name) is None  # its default
        if not missing and (isinstance(value, bool) or not isinstance(value, kind)):
            raise InputError(f"{name} must be {said}, not {value!r}")


@dataclass(frozen=True)
class Media:
    """Pictures of a prompt, preprocessed; the prompt's ids are compact (one media id an item)."""

    pixel_values: Any
    """[patches, 3, P, P] as `openk3.text.image` makes them."""
    grid_thws: Any
    """[items, 3] int64."""
    digests: tuple[bytes, ...]
    """One a picture: what the prefix cache tells different pictures apart by."""


@dataclass(frozen=True)
class Request:
    """One sequence to continue. n choices of one prompt are n requests."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    salt: str = ""
    """Separates prefix caches: tenant, adapter."""
    media: Media | None = None
    constraint: Constraint | None = None
    priority: int = 0
    """Larger goes first; equal ones in order of arrival."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, of the model: no temperature, no filter."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
    """(id, logprob), likeliest first."""


@dataclass(frozen=True)
class Output:
    """What one step brought for one request."""

    request_id: str
    new_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of new_ids, if asked for."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed, because the prefix cache held them."""
    error: str | None = None
    """Why, when finish_reason is "error"."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """With the first new token, if asked for: of the prompt's tokens behind its first."""


@dataclass(frozen=True)
class EngineConfig:
    """The engine's sizes and options. Raises ConfigError on a value that cannot work."""

    hash_block: int = 512
    """Tokens a prefix hash covers: prefixes are reused at multiples of it."""
    page_tokens: int | None = None
    """Latents of one layer in a page, a multiple of hash_block; None takes the least that is no
    smaller than a KDA state."""
    num_pages: int | None = None
    """Pages in the pool; None asks memory_bytes."""
    memory_bytes: int | None = None
    """Size of the pool when num_pages is None; None takes half of what is free, and no more than
    max_running of the longest sequences can use."""
    max_batch_tokens: int = 2048
    """Tokens of one step: decoding rows first, prefill chunks fill the rest."""
    max_running: int = 256
    """Sequences that advance together."""
    max_queued: int = 4096
    """Requests that wait; beyond it `add` raises LimitError."""
    prefix_cache: bool = True
    """Reuse the memory of earlier prompts and answers."""
    host_bytes: int = 0
    """Host memory for pages that are evicted from the pool; 0 drops them."""
    host_file: str | None = None
    """Keep the host tier in this file instead of memory."""
    external: str | None = None
    """A store behind the host tier: "folder:PATH", or "mooncake:SETTINGS.json" (the file that
    MOONCAKE_CONFIG_PATH names). Needs host_bytes, through which its pages come and go."""
    num_drafts: int = 0
    """Draft tokens verified in one step; 0 turns speculation off."""
    draft: Literal["ngram", "mtp"] = "ngram"
    """Where drafts come from: repetitions in the request's own text, or the model's MTP layer."""
    cuda_graphs: bool = True
    """On a GPU, record decoding steps once and replay them."""
    overlap: bool | None = None
    """Plan and launch a step while the one before runs; None: on a GPU, without drafts."""
    two_phase: bool | None = None
    """Mix a block's finished AttnRes blocks at once where that moves fewer bytes; None: on a
    GPU."""
    compiled: bool | Literal["later"] | None = None
    """On a CPU, run steps as compiled C++ (float32 models); None where a compiler is found, and
    True makes it an error if there is none. "later" does not wait for the compiler, which the first
    use on a machine needs: steps run as Python until it is done."""
    batch_invariant: bool = False
    """The same floats, to the last bit, for a request whatever shares its steps, is cached or
    preempted: every token is computed alone, so prompts take as long as answers."""
    debug: bool = False
    """Poison freed pages with NaN and check every invariant at every step."""
    seed: int = 0
    """For requests without one."""

    def overlaps(self, runs_beside_host: bool) -> bool:
        """Whether steps overlap with a runner that computes beside the host, or does not."""
        if self.overlap is not None:
            return self.overlap
        return runs_beside_host and not (self.num_drafts or self.batch_invariant)

    def __post_init__(self) -> None:
        for name in ("hash_block", "max_batch_tokens", "max_running", "max_queued"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.page_tokens is not None and (
            self.page_tokens < 1 or self.page_tokens % self.hash_block
        ):
            raise ConfigError(
                f"page_tokens ({self.page_tokens}) must be a multiple of hash_block "
                f"({self.hash_block})"
            )
        if self.num_pages is not None and self.num_pages < 2:
            raise ConfigError(f"num_pages must be at least 2, not {self.num_pages}")
        if self.host_bytes < 0:
            raise ConfigError(f"host_bytes must be at least 0, not {self.host_bytes}")
        if not 0 <= self.num_drafts <= 16:
            raise ConfigError(f"num_drafts must be within [0, 16], not {self.num_drafts}")
        if self.external is not None and self.host_bytes <= 0:
            raise ConfigError("external needs host_bytes: its pages pass through the host tier")
        if self.num_drafts and self.draft == "mtp" and self.batch_invariant:
            raise ConfigError(
                'draft = "mtp" drafts for several rows at once, batch_invariant computes tokens '
                'alone: use "ngram"'
            )
        if self.overlap and (self.num_drafts or self.batch_invariant):
            raise ConfigError(
                "overlap = true needs steps that bring one token each and runs of several rows: "
                "leave it out with num_drafts or batch_invariant"
            )


@dataclass(frozen=True)
class Stats:
    """Counters and gauges of an engine; `/metrics` shows them."""

    running: int
    waiting: int
    pages: int
    free_pages: int
    """Pages nobody holds, cached or not."""
    cached_pages: int
    """Free pages that still hold a reusable prefix."""
    max_context: int
    """The longest sequence that the pool and the model allow."""
    steps: int = 0
    prompt_tokens: int = 0
    """Of requests admitted so far."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    computed_tokens: int = 0
    """Tokens that went through the model."""
    generated_tokens: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: int = 0
    drafts: int = 0
    """Windows of drafted tokens; each brings one token besides those that are accepted."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Of the drafted ones."""
    host_pages: int = 0
    """Pages kept in the host tier."""
    host_hits: int = 0
    """Pages brought back from it."""
    external_puts: int = 0
    """Pages that the host tier gave to the external store."""
    external_hits: int = 0
    """Pages brought back from that."""
    hash_block: int = 0
    """The shortest prefix that can be reused, and the grain of longer ones, in tokens."""
    wait_seconds: float = 0.0
    """How long the request that waits longest has waited, since it came."""
