"""A checked conversation to what the generation takes: prompt, sampling, grammar, readers."""

from collections.abc import Mapping
from typing import Any

from openk3.api.openai import images
from openk3.api.openai.conversation import Conversation
from openk3.api.openai.errors import ApiError, as_api_error, bad
from openk3.api.openai.generation import Unit
from openk3.api.openai.requests import Sampling
from openk3.api.openai.state import Serving
from openk3.engine.chat import ChatReader, Prompt, chat_prompt
from openk3.engine.types import SamplingParams
from openk3.errors import BackendError, OpenK3Error

LEAST_OF_A_MESSAGE = 6
"""Tokens of an empty one, with any vocabulary: its four markers and its name, twice."""


def prompt_of(state: Serving, conversation: Conversation) -> Prompt:
    """The prompt; blocking. Raises ApiError 400, also for one that does not fit the context."""
    least = LEAST_OF_A_MESSAGE * len(conversation.messages)
    state.require_room(least, lead="at least ")  # rendering a million of them takes minutes
    opened = images.decode(conversation.pictures, state.options.max_image_pixels)
    if opened and state.processor:
        rows = sum(state.processor.num_tokens(i.width, i.height) for i in opened)
        state.require_room(rows, lead="at least ")
    try:
        prompt = chat_prompt(
            conversation.messages,
            state.tokenizer,
            conversation.template,
            processor=state.processor,
            images=opened,
        )
    except OpenK3Error as error:
        raise as_api_error(error) from None
    state.require_room(prompt.num_tokens)
    return prompt


def chat_units(
    state: Serving,
    conversation: Conversation,
    body: Sampling,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
) -> list[Unit]:
    """n choices of a conversation; blocking. Raises ApiError 400."""
    prompt = prompt_of(state, conversation)
    grammar = None
    if conversation.schema is not None or conversation.calls != "none":
        try:
            grammar = state.grammars.compile(
                thinking=prompt.thinking,
                schema=conversation.schema,
                strict=conversation.strict,
                tools=conversation.callable_tools,
                calls=conversation.calls,
                parallel=conversation.parallel,
            )
        except BackendError as error:
            raise ApiError(400, str(error), "unsupported") from None
        except OpenK3Error as error:
            raise as_api_error(error) from None
    return [
        Unit(
            prompt,
            sampling(state, body, prompt.num_tokens, max_tokens, logprobs, i),
            _reader(state, prompt, body),
            grammar.start() if grammar else None,
        )
        for i in range(body.n or 1)
    ]


def _reader(state: Serving, prompt: Prompt, body: Sampling) -> ChatReader:
    try:
        return ChatReader(state.tokenizer, thinking=prompt.thinking, stops=body.stops)
    except OpenK3Error as error:
        raise as_api_error(error) from None


def sampling(
    state: Serving,
    body: Sampling,
    num_prompt: int,
    max_tokens: int | None,
    logprobs: int | None,
    choice: int,
) -> SamplingParams:
    """How choice number `choice` picks its tokens. Raises ApiError 400."""
    if state.options.official_sampling:
        _require_official(body)
    state.require_ids(body.stop_token_ids or (), "stop_token_ids")
    ends = () if body.ignore_eos else state.end_ids
    room = max(1, state.max_context - num_prompt)
    try:
        return SamplingParams(
            max_tokens=min(max_tokens or state.options.default_max_tokens, room),
            temperature=_or(body.temperature, 1.0),
            top_p=_or(body.top_p, 0.95 if state.options.official_sampling else 1.0),
            top_k=max(_or(body.top_k, 0), 0),
            min_p=_or(body.min_p, 0.0),
            presence_penalty=_or(body.presence_penalty, 0.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            repetition_penalty=_or(body.repetition_penalty, 1.0),
            logit_bias=_biases(body.logit_bias or {}, state.vocab_size),
            logprobs=logprobs,
            stop_ids=tuple({*ends, *(body.stop_token_ids or ())}),
            ignore_eos=body.ignore_eos is True,
            seed=None if body.seed is None else _wrapped(body.seed + choice),
        )
    except OpenK3Error as error:
        raise as_api_error(error) from None


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _wrapped(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def _biases(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or not int(key[:20]) < vocab_size:
            raise bad(f"{key!r:.40} is no token id below {vocab_size}", "logit_bias")
        if not -100 <= value <= 100:
            raise bad("values must be within [-100, 100]", "logit_bias")
        biases[int(key)] = value
    return biases


def _require_official(body: Sampling) -> None:
    fixed = {"temperature": 1.0, "top_p": 0.95, "n": 1, "presence_penalty": 0.0,
             "frequency_penalty": 0.0}  # fmt: skip
    for name, value in fixed.items():
        if getattr(body, name) not in (None, value):
            raise bad(f"this server allows only {value:g}", name)
