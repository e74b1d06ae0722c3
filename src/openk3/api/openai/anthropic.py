"""POST /v1/messages: Anthropic's Messages API over the same engine.

A request becomes a conversation as `chat.py` has it; the answer's channels become content blocks.
Signatures of thinking blocks are empty: thoughts come back as plain text and are rendered again.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from openk3.api.openai import prepare, routing
from openk3.api.openai.anthropic_request import CreateBody, MessagesBody, conversation_of, units
from openk3.api.openai.blocks import Block, Blocks
from openk3.api.openai.connection import event
from openk3.api.openai.errors import ApiError
from openk3.api.openai.generation import Generation
from openk3.text.xtml import Delta

PATH = "/v1/messages"
STOP_REASONS = {"length": "max_tokens", "stop": "end_turn", "abort": "pause_turn"}

router = APIRouter()


@router.post(PATH)
async def create(request: Request) -> Response:
    """One message."""
    return await routing.answer(request, CreateBody, units, Message, "msg_")


@router.post(f"{PATH}/count_tokens")
async def count_tokens(request: Request) -> Response:
    """How many tokens a request's prompt has."""
    state = routing.state_of(request)
    body = await routing.read_body(request, MessagesBody)
    prompt = await asyncio.to_thread(lambda: prepare.prompt_of(state, conversation_of(state, body)))
    return JSONResponse({"input_tokens": prompt.num_tokens - prompt.num_pending})


def error_body(error: ApiError) -> dict[str, Any]:
    """An error as Anthropic's clients read it."""
    kind = error.body()["error"]["type"]
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class Message:
    """Writes a generation as one message, or as the events that build it."""

    def __init__(self, generation: Generation, body: CreateBody) -> None:
        self._generation = generation
        self._blocks = Blocks(generation.state.new_id)

    async def whole(self) -> dict[str, Any]:
        """The message object. Raises ApiError if generation failed."""
        await self._blocks.take_all(self._generation)
        content = [_whole(block) for block in self._blocks]
        return {**self._head(), "content": content, **self._end(), "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        usage = {**self._usage(), "output_tokens": 0}
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None,
                   "usage": usage}  # fmt: skip
        yield _event("message_start", message=message)
        index = -1
        async for part in self._generation.parts():
            for delta in part.deltas:
                if self._blocks.take(delta):
                    if index >= 0:
                        yield _event("content_block_stop", index=index)
                    index += 1
                    block = _begun(self._blocks[index])
                    yield _event("content_block_start", index=index, content_block=block)
                if delta.kind != "call":
                    yield _event("content_block_delta", index=index, delta=_delta(delta))
        if index >= 0:
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=self._end(), usage=self._usage())
        yield _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return event(error_body(error), "error")

    def _head(self) -> dict[str, Any]:
        return {"id": self._generation.id, "type": "message", "role": "assistant",
                "model": self._generation.state.model}  # fmt: skip

    def _end(self) -> dict[str, Any]:
        [choice] = self._generation.choices
        if choice.reader.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.reader.stop}
        reason = STOP_REASONS.get(choice.finish_reason or "")
        if reason == "end_turn" and any(block.kind == "call" for block in self._blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        usage = self._generation.usage()
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        }


def _begun(block: Block) -> dict[str, Any]:
    """A block of which nothing is said yet."""
    if block.kind == "thought":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind == "call":
        return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.tool, "input": {}}
    return {"type": "text", "text": ""}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {**_begun(block), "input": _object(block.text)}
    return {**_begun(block), "thinking" if block.kind == "thought" else "text": block.text}


def _delta(delta: Delta) -> dict[str, str]:
    if delta.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": delta.text}
    if delta.kind == "arguments":
        return {"type": "input_json_delta", "partial_json": delta.text}
    return {"type": "text_delta", "text": delta.text}


def _event(name: str, /, **data: Any) -> bytes:
    return event({"type": name, **data}, name)


def _object(written: str) -> dict[str, Any]:
    """A call's arguments; a call that was cut, or is no object, keeps its text under one key."""
    try:
        value = json.loads(written or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"_raw": written}
