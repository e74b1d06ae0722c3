"""POST /v1/completions: plain text goes on, whole and streamed."""

import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from openk3.api.openai import logprobs, prepare, routing
from openk3.api.openai.connection import event
from openk3.api.openai.errors import ApiError, as_api_error, bad
from openk3.api.openai.generation import Generation, Unit
from openk3.api.openai.requests import MAX_CHOICES, CompletionBody
from openk3.api.openai.state import Serving
from openk3.engine.chat import Prompt, text_prompt
from openk3.engine.choice import Part
from openk3.engine.text_stream import TextReader
from openk3.engine.types import TokenLogprobs
from openk3.errors import OpenK3Error

DEFAULT_MAX_TOKENS = 16  # OpenAI's

router = APIRouter()


@router.post("/v1/completions")
async def create(request: Request) -> Response:
    """Continuations of one or more prompts."""
    return await routing.answer(request, CompletionBody, units, Texts, "cmpl-")


def units(state: Serving, body: CompletionBody) -> list[Unit]:
    """The choices that a body asks for; blocking. Raises ApiError."""
    if body.suffix:
        raise bad("is not supported", "suffix")
    if body.best_of not in (None, body.n or 1):
        raise bad("must equal n: choices are not ranked here", "best_of")
    prompts = _prompts(state, body)
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        raise bad(f"more than {MAX_CHOICES} choices", "prompt")
    found = []
    try:
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
        for prompt in prompts:
            state.require_room(prompt.num_tokens, "prompt")
            for i in range(body.n or 1):
                params = prepare.sampling(state, body, prompt.num_tokens, wanted, body.logprobs, i)
                if body.echo:
                    params = replace(params, prompt_logprobs=body.logprobs)
                found.append(Unit(prompt, params, TextReader(state.tokenizer, body.stops)))
    except OpenK3Error as error:
        raise as_api_error(error) from None
    return found


def _prompts(state: Serving, body: CompletionBody) -> list[Prompt]:
    given = body.prompt
    if not given and not isinstance(given, str):
        raise bad("must not be empty", "prompt")
    if isinstance(given, str):
        lists = [state.tokenizer.encode(given)]
    else:
        nested = [p for p in given if not isinstance(p, int)]
        lists = [state.tokenizer.encode(p) if isinstance(p, str) else p for p in nested]
        lists = lists or [[p for p in given if isinstance(p, int)]]
    for ids in lists:
        state.require_ids(ids, "prompt")
    return [text_prompt(ids, state.tokenizer) for ids in lists]


class Texts:
    """Writes a generation as OpenAI's text completion or its chunks."""

    def __init__(self, generation: Generation, body: CompletionBody) -> None:
        self._state, self._generation, self._body = generation.state, generation, body
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}

    async def whole(self) -> dict[str, Any]:
        """The completion object. Raises ApiError if a choice failed."""
        number = len(self._generation.choices)
        texts = [self._echo(i) for i in range(number)]
        parts: list[list[Part]] = [[] for _ in range(number)]
        async for part in self._parts():
            texts[part.index] += _text(part)
            parts[part.index].append(part)
        choices = [
            {"index": i, "text": texts[i], "logprobs": self._logprobs(i, parts[i]),
             "finish_reason": parts[i][-1].finish_reason}
            for i in range(number)
        ]  # fmt: skip
        return {**self._head(), "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Chunks. Usage comes with the last choice's end, or, asked for, after it."""
        left = len(self._generation.choices)
        echoed: set[int] = set()
        waiting: dict[int, list[Part]] = {}
        async for part in self._parts():
            waiting.setdefault(part.index, []).append(part)
            text = _text(part)
            if part.index not in echoed:
                text = self._echo(part.index) + text
                echoed.add(part.index)
            if not text and part.finish_reason is None:
                continue
            found = self._logprobs(part.index, waiting.pop(part.index))
            choice = {"index": part.index, "text": text, "logprobs": found,
                      "finish_reason": part.finish_reason}  # fmt: skip
            chunk = {**self._head(), "choices": [choice]}
            left -= part.finish_reason is not None
            if left == 0 and self._body.include_usage is None:
                chunk["usage"] = self._usage()
            yield event(chunk)
        if self._body.include_usage:
            usage = self._usage()
            yield event({**self._head(), "choices": [], "usage": usage})
        yield event("[DONE]")

    def failed(self, error: ApiError) -> bytes:
        return event(error.body())

    def _echo(self, index: int) -> str:
        if not self._body.echo:
            return ""
        tokenizer, ids = self._state.tokenizer, self._generation.units[index].prompt.ids
        return tokenizer.decode(filter(tokenizer.knows, ids))

    async def _parts(self) -> AsyncGenerator[Part, None]:
        """The generation's; nothing of what it made where the prompt alone is wanted."""
        async for part in self._generation.parts():
            if self._body.max_tokens == 0 and part.finish_reason in ("length", "stop"):
                part = replace(part, deltas=[], ids=(), logprobs=(), finish_reason="length")
            yield part

    def _usage(self) -> dict[str, object]:
        usage = self._generation.usage()
        if self._body.max_tokens == 0:
            usage = replace(usage, completion_tokens=0)
        return usage.openai()

    def _logprobs(self, index: int, parts: list[Part]) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        ids = [token_id for part in parts for token_id in part.ids]
        found: list[TokenLogprobs | None] = [one for part in parts for one in part.logprobs]
        if self._body.echo and index not in self._offsets:
            ids = [*self._generation.units[index].prompt.ids, *ids]
            found = [None, *(one for part in parts for one in part.prompt_logprobs), *found]
        offset = self._offsets.get(index, 0)
        written = logprobs.legacy(self._state.tokenizer, ids, found, offset)
        self._offsets[index] = offset + sum(map(len, written["tokens"]))
        return written

    def _head(self) -> dict[str, Any]:
        return {"id": self._generation.id, "object": "text_completion", "created": self._created,
                "model": self._state.model}  # fmt: skip


def _text(part: Part) -> str:
    return "".join(delta.text for delta in part.deltas)
