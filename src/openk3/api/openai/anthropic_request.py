"""What a request to Anthropic's Messages API says, as the conversation that `chat.py` has of it."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from openk3.api.openai import prepare
from openk3.api.openai.conversation import Conversation, joined_text, read
from openk3.api.openai.errors import bad
from openk3.api.openai.generation import Unit
from openk3.api.openai.images import Pictures
from openk3.api.openai.requests import (
    AnswerBody,
    Body,
    Messages,
    Objects,
    Sampling,
    Thinking,
    Words,
)
from openk3.api.openai.state import Serving

CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesBody(Body):
    """What both paths read."""

    messages: Messages
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class CreateBody(MessagesBody, AnswerBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop_sequences: Words | None = None


def units(state: Serving, body: CreateBody) -> list[Unit]:
    """The one choice that a body asks for; blocking. Raises ApiError."""
    sampling = Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
    )
    talk = conversation_of(state, body)
    return prepare.chat_units(state, talk, sampling, max_tokens=body.max_tokens)


def conversation_of(state: Serving, body: MessagesBody) -> Conversation:
    """The conversation of a body, checked. Raises ApiError."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": joined_text(body.system, "system")})
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{i}]")
    choice = body.tool_choice or {}
    return read(
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
