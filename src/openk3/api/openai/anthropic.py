"""POST /v1/messages: Anthropic's Messages API over the same engine.

A request becomes a conversation as `chat.py` has it; the answer's channels become content blocks.
Signatures of thinking blocks are empty: thoughts come back as plain text and are rendered again.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from openk3.api.openai import conversation, prepare, routing
from openk3.api.openai.chat import CallIds
from openk3.api.openai.connection import event, while_connected
from openk3.api.openai.conversation import bad, joined_text
from openk3.api.openai.errors import ApiError
from openk3.api.openai.generation import Generation, Unit
from openk3.api.openai.images import Pictures
from openk3.api.openai.requests import Body, Sampling, Thinking
from openk3.api.openai.state import Serving
from openk3.engine.choice import Part
from openk3.text.xtml import Delta

PATH = "/v1/messages"
STOP_REASONS = {"length": "max_tokens", "stop": "end_turn", "abort": "pause_turn"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}

router = APIRouter()


class MessagesBody(Body):
    """What both paths read."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class CreateBody(MessagesBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop_sequences: list[str] | None = None


@router.post(PATH)
async def create(request: Request) -> Response:
    """One message."""
    state: Serving = request.app.state.serving
    body = await routing.read_body(request, CreateBody)
    state.require_model(body.model)
    name = f"msg_{state.new_id()}"
    generation = await routing.begin(state, request, lambda: _units(state, body), name)
    writer = Message(state, generation)
    if body.stream:
        return routing.stream(state, generation, writer.events())
    try:
        return JSONResponse(await while_connected(request, writer.whole()))
    finally:
        generation.close()


@router.post(f"{PATH}/count_tokens")
async def count_tokens(request: Request) -> Response:
    """How many tokens a request's prompt has."""
    state: Serving = request.app.state.serving
    body = await routing.read_body(request, MessagesBody)
    state.require_model(body.model)
    prompt = await asyncio.to_thread(lambda: prepare.prompt_of(state, _conversation(state, body)))
    return JSONResponse({"input_tokens": prompt.num_tokens - prompt.num_pending})


def error_body(error: ApiError) -> dict[str, Any]:
    """An error as Anthropic's clients read it."""
    kind = error.body()["error"]["type"]
    return {"type": "error", "error": {"type": kind, "message": error.message}}


# The request.


def _units(state: Serving, body: CreateBody) -> list[Unit]:
    sampling = Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
    )
    read = _conversation(state, body)
    return prepare.chat_units(state, read, sampling, max_tokens=body.max_tokens)


def _conversation(state: Serving, body: MessagesBody) -> conversation.Conversation:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": joined_text(body.system, "system")})
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{i}]")
    choice = body.tool_choice or {}
    return conversation.read(
        messages,
        Pictures(state.options.max_images),
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])],
        tool_choice=_choice(choice),
        thinking=_thinking(body.thinking),
        reasoning_effort=(body.output_config or {}).get("effort"),
        parallel=choice.get("disable_parallel_tool_use") is not True,
    )


def _thinking(given: Mapping[str, Any] | None) -> Thinking:
    """Thoughts are on only when asked for, as Anthropic's clients expect."""
    kind = (given or {}).get("type", "disabled")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise bad("type must be enabled, disabled or adaptive", "thinking")
    return Thinking(type="disabled" if kind == "disabled" else "enabled")


def _choice(choice: Mapping[str, Any]) -> str | dict[str, Any] | None:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind is not None and kind not in list(CHOICES):
        raise bad(f"type must be one of {', '.join(CHOICES)}, tool", "tool_choice")
    return CHOICES[kind] if kind else None


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise bad("only custom tools are known here", where)
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    for key in ("description", "strict"):
        if key in tool:
            function[key] = tool[key]
    return {"type": "function", "function": function}


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One message; tool results become messages of their own, before the text beside them."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise bad("role must be user or assistant", where)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise bad("content must be text or a list of blocks", where)
    if role == "assistant":
        return [_assistant(content, where)]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for j, block in enumerate(content):
        here = f"{where}.content[{j}]"
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            body = block.get("content") or ""
            if isinstance(body, list):
                body = [_part(part, here) for part in body]
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"),
                            "content": body})  # fmt: skip
        else:
            parts.append(_part(block, here))
    return results + ([{"role": "user", "content": parts}] if parts else [])


def _part(block: Any, where: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text":
        return {"type": "text", "text": block.get("text")}
    if kind != "image":
        raise bad("type must be text, image or tool_result", where)
    source = block.get("source")
    if not isinstance(source, Mapping) or source.get("type") != "base64":
        raise bad("source must be base64; this server fetches no pictures", where)
    url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _assistant(content: list[Any], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    thoughts, calls = [], []
    for j, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            message["content"] += joined_text([block], f"{where}.content[{j}]")
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise bad("type must be text, thinking or tool_use", f"{where}.content[{j}]")
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


# The answer.


class Message:
    """Writes a generation as one message, or as the events that build it."""

    def __init__(self, state: Serving, generation: Generation) -> None:
        self._state, self._generation = state, generation
        self._call_id = CallIds(state, "toolu_")
        self._open: str | None = None
        self._index = -1

    async def whole(self) -> dict[str, Any]:
        """The message object. Raises ApiError if generation failed."""
        blocks: list[dict[str, Any]] = []
        written: list[list[str]] = []
        last: Part | None = None
        async for part in self._generation.parts():
            if part.finish_reason == "error":
                raise ApiError(500, f"generation failed: {part.error}", "generation_failed")
            for delta in part.deltas:
                if delta.kind == "answer":  # what seemed a thought was the answer
                    blocks, written, self._open = [], [], None
                if self._begins(delta):
                    blocks.append(self._block(delta))
                    written.append([])
                if delta.kind != "call":
                    written[-1].append(delta.text)
            last = part
        for block, texts in zip(blocks, written, strict=True):
            text = "".join(texts)
            if block["type"] == "tool_use":
                block["input"] = _object(text)
            else:
                block["thinking" if block["type"] == "thinking" else "text"] = text
        return {**self._head(), "content": blocks, **self._end(last), "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        usage = {**self._usage(), "output_tokens": 0}
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None,
                   "usage": usage}  # fmt: skip
        yield _event("message_start", message=message)
        last: Part | None = None
        async for part in self._generation.parts():
            if part.finish_reason == "error":
                failure = ApiError(500, f"generation failed: {part.error}")
                yield event(error_body(failure), "error")
                return
            for delta in part.deltas:
                if self._begins(delta):
                    if self._index > 0:
                        yield _event("content_block_stop", index=self._index - 1)
                    block = self._block(delta)
                    yield _event("content_block_start", index=self._index, content_block=block)
                if delta.kind != "call":
                    inner = self._delta(delta)
                    yield _event("content_block_delta", index=self._index, delta=inner)
            last = part
        if self._index >= 0:
            yield _event("content_block_stop", index=self._index)
        yield _event("message_delta", delta=self._end(last), usage=self._usage())
        yield _event("message_stop")

    def _begins(self, delta: Delta) -> bool:
        """Whether `delta` is the first of a block."""
        names = {"reasoning": "thinking", "content": "text", "answer": "text"}
        kind = names.get(delta.kind, f"call {delta.index}")
        if kind == self._open:
            return False
        self._open = kind
        self._index += 1
        return True

    def _block(self, delta: Delta) -> dict[str, Any]:
        if delta.kind == "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        if delta.kind == "call":
            name = self._call_id(0, delta.index)
            return {"type": "tool_use", "id": name, "name": delta.text, "input": {}}
        return {"type": "text", "text": ""}

    def _delta(self, delta: Delta) -> dict[str, str]:
        if delta.kind == "reasoning":
            return {"type": "thinking_delta", "thinking": delta.text}
        if delta.kind == "arguments":
            return {"type": "input_json_delta", "partial_json": delta.text}
        return {"type": "text_delta", "text": delta.text}

    def _head(self) -> dict[str, Any]:
        return {"id": self._generation.id, "type": "message", "role": "assistant",
                "model": self._state.model}  # fmt: skip

    def _end(self, last: Part | None) -> dict[str, Any]:
        stop = getattr(self._generation.units[0].reader, "stop", None)
        reason = last.finish_reason if last else None
        if stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        if reason == "stop" and self._call_id.count(0):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": STOP_REASONS.get(reason or ""), "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        usage = self._generation.usage()
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        }


def _event(name: str, /, **data: Any) -> bytes:
    return event({"type": name, **data}, name)


def _object(written: str) -> dict[str, Any]:
    """A call's arguments; a call that was cut, or is no object, keeps its text under one key."""
    try:
        value = json.loads(written or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"_raw": written}
