"""POST /v1/responses: the part of OpenAI's Responses API that needs no stored state."""

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from openk3.api.openai import conversation, prepare, routing
from openk3.api.openai.connection import event, while_connected
from openk3.api.openai.conversation import bad, joined_text
from openk3.api.openai.errors import ApiError
from openk3.api.openai.generation import Generation, Unit
from openk3.api.openai.images import Pictures
from openk3.api.openai.requests import Body, Sampling
from openk3.api.openai.state import Serving
from openk3.engine.choice import Part
from openk3.text.xtml import Delta

router = APIRouter()


class ResponsesBody(Body):
    """POST /v1/responses."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None


@router.post("/v1/responses")
async def create(request: Request) -> Response:
    """One response."""
    state: Serving = request.app.state.serving
    body = await routing.read_body(request, ResponsesBody)
    state.require_model(body.model)
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name):
            raise bad("is not supported: this server stores no responses", name)
    name = f"resp_{state.new_id()}"
    generation = await routing.begin(state, request, lambda: _units(state, body), name)
    writer = Writer(state, generation, body)
    if body.stream:
        return routing.stream(state, generation, writer.events())
    try:
        return JSONResponse(await while_connected(request, writer.whole()))
    finally:
        generation.close()


# The request.


def _units(state: Serving, body: ResponsesBody) -> list[Unit]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for i, item in enumerate(body.input):
            _add(item, messages, f"input[{i}]")
    if not messages:
        raise bad("must not be empty", "input")
    read = conversation.read(
        messages,
        Pictures(state.options.max_images),
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])],
        tool_choice=_choice(body.tool_choice),
        response_format=_format(body.text),
        reasoning_effort=(body.reasoning or {}).get("effort"),
        parallel=body.parallel_tool_calls,
    )
    sampling = Sampling(temperature=body.temperature, top_p=body.top_p)
    return prepare.chat_units(state, read, sampling, max_tokens=body.max_output_tokens)


def _add(item: Mapping[str, Any], messages: list[dict[str, Any]], where: str) -> None:
    """Add an input item; thoughts and calls belong to the assistant message they stand in."""
    kind = item.get("type", "message")
    if kind == "message":
        role, content = item.get("role"), item.get("content")
        if role == "assistant":
            _assistant(messages)["content"] += joined_text(content, f"{where}.content")
            return
        if isinstance(content, list):
            content = [_part(part, f"{where}.content[{j}]") for j, part in enumerate(content)]
        messages.append({"role": role, "content": content})
    elif kind == "reasoning":
        thought = joined_text(item.get("content") or "", f"{where}.content")
        _assistant(messages)["reasoning_content"] = thought
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        body = item.get("output")
        if isinstance(body, list):
            body = [_part(part, where) for part in body]
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": body})
    else:
        raise bad("type must be message, reasoning, function_call or function_call_output", where)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": part.get("text")}
    if kind == "input_image":
        return {"type": "image_url", "image_url": part.get("image_url")}
    raise bad("type must be input_text, output_text or input_image", where)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad("only function tools are known here", where)
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in names if key in tool}}


def _choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, Mapping):
        return choice
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    given = (text or {}).get("format")
    if not isinstance(given, Mapping):
        return None
    if given.get("type") != "json_schema":
        return {"type": given.get("type")}
    return {"type": "json_schema", "json_schema": dict(given)}


# The answer: items in order of their first delta.


class Writer:
    """Writes a generation as one response, or as the events that build it."""

    def __init__(self, state: Serving, generation: Generation, body: ResponsesBody) -> None:
        self._state, self._generation, self._body = state, generation, body
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []
        self._open: str | None = None
        self._number = -1

    async def whole(self) -> dict[str, Any]:
        """The response object. Raises ApiError if generation failed."""
        last: Part | None = None
        async for part in self._generation.parts():
            if part.finish_reason == "error":
                raise ApiError(500, f"generation failed: {part.error}", "generation_failed")
            for delta in part.deltas:
                if delta.kind == "answer":
                    self._items, self._texts, self._open = [], [], None
                self._take(delta)
            last = part
        items = [self._done(i) for i in range(len(self._items))]
        return self._response(last.finish_reason if last else None, items)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        response = self._response("in_progress", [])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)
        reason: str | None = None
        async for part in self._generation.parts():
            reason = part.finish_reason
            if reason == "error":
                failure = {"code": "server_error", "message": f"generation failed: {part.error}"}
                response = {**self._response("failed", []), "error": failure}
                yield self._event("response.failed", response=response)
                return
            for delta in part.deltas:
                before = len(self._items)
                is_new = self._take(delta)
                if is_new and before:
                    for piece in self._endings(before - 1):
                        yield piece
                if is_new:
                    for piece in self._beginnings():
                        yield piece
                if delta.kind != "call":
                    yield self._delta(delta)
        if self._items:
            for piece in self._endings(len(self._items) - 1):
                yield piece
        items = [self._done(i) for i in range(len(self._items))]
        response = self._response(reason, items)
        yield self._event(f"response.{response['status']}", response=response)

    def _take(self, delta: Delta) -> bool:
        """Add a delta; whether it began an item."""
        names = {"reasoning": "reasoning", "content": "message", "answer": "message"}
        kind = names.get(delta.kind, f"call {delta.index}")
        is_new = kind != self._open
        if is_new:
            self._open = kind
            self._items.append(self._item(delta))
            self._texts.append([])
        if delta.kind != "call":
            self._texts[-1].append(delta.text)
        return is_new

    def _item(self, delta: Delta) -> dict[str, Any]:
        name = self._state.new_id()
        if delta.kind == "reasoning":
            return {"type": "reasoning", "id": f"rs_{name}", "summary": []}
        if delta.kind == "call":
            call = f"call_{self._state.new_id()}"
            return {"type": "function_call", "id": f"fc_{name}", "call_id": call,
                    "name": delta.text, "arguments": "", "status": "in_progress"}  # fmt: skip
        return {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [],
                "status": "in_progress"}  # fmt: skip

    def _done(self, index: int) -> dict[str, Any]:
        item, text = self._items[index], "".join(self._texts[index])
        if item["type"] == "function_call":
            return {**item, "arguments": text, "status": "completed"}
        if item["type"] == "reasoning":
            return {**item, "content": [{"type": "reasoning_text", "text": text}]}
        return {**item, "content": [_output(text)], "status": "completed"}

    def _beginnings(self) -> list[bytes]:
        index, item = len(self._items) - 1, self._items[-1]
        pieces = [self._event("response.output_item.added", output_index=index, item=item)]
        if item["type"] == "message":
            pieces.append(self._event(
                "response.content_part.added", item_id=item["id"], output_index=index,
                content_index=0, part=_output(""),
            ))  # fmt: skip
        return pieces

    def _endings(self, index: int) -> list[bytes]:
        item, text = self._done(index), "".join(self._texts[index])
        place = {"item_id": item["id"], "output_index": index}
        pieces = []
        if item["type"] == "function_call":
            pieces.append(self._event(
                "response.function_call_arguments.done", **place, name=item["name"],
                arguments=text,
            ))  # fmt: skip
        elif item["type"] == "reasoning":
            pieces.append(self._event(
                "response.reasoning_text.done", **place, content_index=0, text=text
            ))  # fmt: skip
        else:
            pieces.append(self._event(
                "response.output_text.done", **place, content_index=0, text=text, logprobs=[]
            ))  # fmt: skip
            pieces.append(self._event(
                "response.content_part.done", **place, content_index=0, part=_output(text)
            ))  # fmt: skip
        done = self._event("response.output_item.done", output_index=index, item=item)
        return [*pieces, done]

    def _delta(self, delta: Delta) -> bytes:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        if delta.kind == "arguments":
            return self._event("response.function_call_arguments.delta", **place, delta=delta.text)
        if delta.kind == "reasoning":
            return self._event(
                "response.reasoning_text.delta", **place, content_index=0, delta=delta.text
            )
        return self._event(
            "response.output_text.delta", **place, content_index=0, delta=delta.text, logprobs=[]
        )

    def _event(self, name: str, /, **data: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **data}, name)

    def _response(self, reason: str | None, items: list[dict[str, Any]]) -> dict[str, Any]:
        status = {"stop": "completed", "in_progress": "in_progress", "failed": "failed"}
        usage = self._generation.usage()
        short = {"length": "max_output_tokens"}.get(reason or "")
        return {
            "id": self._generation.id,
            "object": "response",
            "created_at": self._created,
            "model": self._state.model,
            "status": status.get(reason or "", "incomplete"),
            "incomplete_details": {"reason": short} if short else None,
            "error": None,
            "instructions": self._body.instructions,
            "output": items,
            "parallel_tool_calls": self._body.parallel_tool_calls is not False,
            "tool_choice": self._body.tool_choice or "auto",
            "tools": self._body.tools or [],
            "metadata": {},
            "temperature": self._body.temperature,
            "top_p": self._body.top_p,
            "usage": None if reason == "in_progress" else {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }  # fmt: skip


def _output(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
