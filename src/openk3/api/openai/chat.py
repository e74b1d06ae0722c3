"""POST /v1/chat/completions, whole and streamed."""

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from openk3.api.openai import conversation, logprobs, prepare, routing
from openk3.api.openai.connection import event
from openk3.api.openai.errors import ApiError
from openk3.api.openai.generation import Generation, Unit
from openk3.api.openai.images import Pictures
from openk3.api.openai.requests import ChatBody
from openk3.api.openai.state import Serving
from openk3.engine.choice import Part
from openk3.text.xtml import Accumulator, Delta

router = APIRouter()


@router.post("/v1/chat/completions")
async def create(request: Request) -> Response:
    """One or more answers to a conversation."""
    return await routing.answer(request, ChatBody, units, Chunks, "chatcmpl-")


def units(state: Serving, body: ChatBody) -> list[Unit]:
    """The choices that a body asks for; blocking. Raises ApiError."""
    read = conversation.read(
        body.messages,
        Pictures(state.options.max_images),
        tools=body.tools,
        tool_choice=body.tool_choice,
        response_format=body.response_format,
        thinking=body.thinking,
        reasoning_effort=body.reasoning_effort,
        template_options=body.chat_template_kwargs,
        parallel=body.parallel_tool_calls,
    )
    return prepare.chat_units(
        state,
        read,
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def finish_reason(part: Part, num_calls: int) -> str | None:
    """An answer that was cut off is "length" even if it holds calls."""
    return "tool_calls" if part.finish_reason == "stop" and num_calls else part.finish_reason


class CallIds:
    """An id for each tool call: never seen before, whatever a conversation's history holds."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._ids: dict[tuple[int, int], str] = {}

    def __call__(self, choice: int, index: int) -> str:
        return self._ids.setdefault((choice, index), f"call_{self._new_id()}")

    def count(self, choice: int) -> int:
        """Calls of a choice so far."""
        return sum(c == choice for c, _ in self._ids)


class Chunks:
    """Writes a generation as OpenAI's chat completion or its chunks."""

    def __init__(self, generation: Generation, body: ChatBody) -> None:
        self._state, self._generation, self._body = generation.state, generation, body
        self._created = int(time.time())
        self._call_id = CallIds(self._state.new_id)
        self._unsent: dict[int, list[dict[str, Any]]] = {}

    async def whole(self) -> dict[str, Any]:
        """The completion object. Raises ApiError if a choice failed."""
        messages = [Accumulator() for _ in self._generation.choices]
        reasons: dict[int, str | None] = {}
        probabilities: dict[int, list[dict[str, Any]]] = {}
        async for part in self._generation.parts():
            for delta in part.deltas:
                messages[part.index].add(delta)
                if delta.kind == "call":
                    self._call_id(part.index, delta.index)
            probabilities.setdefault(part.index, []).extend(self._logprobs(part))
            reasons[part.index] = finish_reason(part, self._call_id.count(part.index))
        choices = [
            {
                "index": i,
                "message": self._message(i, accumulated.message()),
                "logprobs": {"content": probabilities[i]} if self._body.logprobs else None,
                "finish_reason": reasons[i],
            }
            for i, accumulated in enumerate(messages)
        ]
        head = self._head("chat.completion")
        return {**head, "choices": choices, "usage": self._generation.usage().openai()}

    def _message(self, choice: int, message: dict[str, Any]) -> dict[str, Any]:
        calls = message.get("tool_calls")
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {"id": self._call_id(choice, i), **call} for i, call in enumerate(calls)
            ]
        return message

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Chunks. Usage comes with the last choice's end, or, asked for, after it."""
        left = len(self._generation.choices)
        for choice in self._generation.choices:
            yield self._chunk(choice.index, {"role": "assistant"})
        async for part in self._generation.parts():
            self._unsent.setdefault(part.index, []).extend(self._logprobs(part))
            for delta in part.deltas:
                yield self._chunk(part.index, self._delta(part.index, delta))
            if part.finish_reason is not None:
                left -= 1
                reason = finish_reason(part, self._call_id.count(part.index))
                last = left == 0 and self._body.include_usage is None
                yield self._chunk(part.index, {}, reason, with_usage=last)
        if self._body.include_usage:
            head = self._head("chat.completion.chunk")
            yield event({**head, "choices": [], "usage": self._generation.usage().openai()})
        yield event("[DONE]")

    def failed(self, error: ApiError) -> bytes:
        return event(error.body())

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        *,
        with_usage: bool = False,
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": reason}
        if self._body.logprobs and self._unsent.get(index):
            choice["logprobs"] = {"content": self._unsent.pop(index)}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if with_usage:
            chunk["usage"] = self._generation.usage().openai()
        return event(chunk)

    def _delta(self, choice: int, delta: Delta) -> dict[str, Any]:
        """No key is null: a key that is there says which channel goes on."""
        if delta.kind == "reasoning":
            return {"reasoning_content": delta.text}
        if delta.kind in ("content", "answer"):
            return {"content": delta.text}
        if delta.kind == "call":
            function = {"name": delta.text, "arguments": ""}
            name = self._call_id(choice, delta.index)
            call = {"index": delta.index, "id": name, "type": "function", "function": function}
            return {"tool_calls": [call]}
        call = {"index": delta.index, "function": {"arguments": delta.text}}
        return {"tool_calls": [call]}

    def _logprobs(self, part: Part) -> list[dict[str, Any]]:
        if not self._body.logprobs or not part.logprobs:
            return []
        return logprobs.chat(self._state.tokenizer, part.ids, part.logprobs)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._generation.id, "object": kind, "created": self._created,
                "model": self._state.model}  # fmt: skip
