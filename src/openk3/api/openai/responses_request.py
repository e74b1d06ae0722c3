"""What a request to OpenAI's Responses API says, as the conversation that `chat.py` has of it."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from openk3.api.openai import prepare
from openk3.api.openai.conversation import joined_text, read
from openk3.api.openai.errors import bad
from openk3.api.openai.generation import Unit
from openk3.api.openai.images import Pictures
from openk3.api.openai.requests import AnswerBody, Objects, Sampling
from openk3.api.openai.state import Serving


class ResponsesBody(AnswerBody):
    """POST /v1/responses."""

    input: str | Objects
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None


def units(state: Serving, body: ResponsesBody) -> list[Unit]:
    """The one choice that a body asks for; blocking. Raises ApiError."""
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name):
            raise bad("is not supported: this server stores no responses", name)
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
    talk = read(
        messages,
        Pictures(state.options.max_images),
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])],
        tool_choice=_choice(body.tool_choice),
        response_format=_format(body.text),
        reasoning_effort=(body.reasoning or {}).get("effort"),
        parallel=body.parallel_tool_calls,
    )
    sampling = Sampling(temperature=body.temperature, top_p=body.top_p)
    return prepare.chat_units(state, talk, sampling, max_tokens=body.max_output_tokens)


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
