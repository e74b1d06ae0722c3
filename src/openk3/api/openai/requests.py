"""The bodies that callers send: names and types of their fields. Unknown fields are ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator, model_validator

MAX_CHOICES = 128
MAX_BIASES = 1024

# Without bounds a body of a few megabytes has millions of wrong items, and pydantic lists them all.
Objects = Annotated[list[dict[str, Any]], Field(max_length=1 << 17)]
Messages = Annotated[Objects, Field(min_length=1)]
Words = Annotated[list[str], Field(max_length=1024)]
Ids = Annotated[list[int], Field(max_length=1 << 21), FailFast()]


class Exact(BaseModel):
    """Types are exact: "0.5" is no number, 1 is no boolean."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Body(Exact):
    """Any body may name the model that it is for."""

    model: str | None = None


class AnswerBody(Body):
    """What every body that asks for an answer may hold."""

    stream: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=256)


class Sampling(AnswerBody):
    """Fields of both completions endpoints."""

    stream_options: dict[str, Any] | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    logit_bias: dict[str, Any] | None = Field(default=None, max_length=MAX_BIASES)
    max_tokens: int | None = Field(default=None, ge=0)
    stop: str | Words | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=1024)
    ignore_eos: bool | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        if given and not all(type(value) in (int, float) for value in given.values()):
            raise ValueError("values must be numbers")
        return given

    @model_validator(mode="after")
    def _options(self) -> "Sampling":
        if not isinstance(self.include_usage, (bool, type(None))):
            raise ValueError("stream_options.include_usage must be true or false")
        if self.max_tokens == 0 and not getattr(self, "echo", None):
            raise ValueError("max_tokens must be at least 1; 0 only where a prompt is echoed")
        return self

    @property
    def include_usage(self) -> bool | None:
        """Whether a stream ends with an event of usage; None puts it in the last choice's."""
        return (self.stream_options or {}).get("include_usage")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Thinking(Exact):
    """Moonshot's switch. `keep` is accepted: thoughts always stay in the conversation."""

    type: Literal["enabled", "disabled"] | None = None
    effort: str | None = None
    keep: Any = None


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _logprobs(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


class CompletionBody(Sampling):
    """POST /v1/completions."""

    prompt: Any
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, given: Any) -> Any:
        """By hand: of a union pydantic would tell what is wrong with every item in every case."""
        kinds = (_is_text, _is_id, _is_ids)
        if _is_text(given):
            return given
        if isinstance(given, list) and any(all(map(fits, given)) for fits in kinds):
            return given
        raise ValueError("must be a text, token ids, or a list of texts or of lists of token ids")


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation as for chat completions."""

    prompt: str | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    thinking: Thinking | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Ids


def _is_text(given: Any) -> bool:
    return isinstance(given, str)


def _is_id(given: Any) -> bool:
    return type(given) is int


def _is_ids(given: Any) -> bool:
    return isinstance(given, list) and all(map(_is_id, given))
