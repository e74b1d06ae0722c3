"""What a chat request says, checked: messages, tools, thinking, answer format.

User text is only ever text: it is encoded without special tokens, and a placeholder that somebody
typed stands for no picture.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from openk3.api.openai.errors import bad
from openk3.api.openai.images import Pictures
from openk3.api.openai.requests import Thinking
from openk3.engine.chat import Template

EFFORTS = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "max",
           "max": "max"}  # fmt: skip
ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,255}")
FORMATS = ("text", "json_object", "json_schema")


@dataclass(frozen=True)
class Conversation:
    """A chat request as the engine's side takes it."""

    messages: list[dict[str, Any]]
    template: Template
    pictures: list[bytes] = field(default_factory=list)
    schema: Mapping[str, Any] | None = None
    """Of the answer, when it must be JSON."""
    strict: bool = True
    calls: Literal["none", "auto", "required"] = "none"
    """Whether a grammar sees to the calls."""
    callable_tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that the grammar allows."""
    parallel: bool = True


def read(
    messages: Sequence[Mapping[str, Any]],
    pictures: Pictures,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    thinking: Thinking | None = None,
    reasoning_effort: str | None = None,
    template_options: Mapping[str, Any] | None = None,
    parallel: bool | None = None,
) -> Conversation:
    """Check a request's fields and put them together. Raises ApiError 400 naming the field."""
    is_thinking, effort = _thinking(thinking, reasoning_effort, template_options or {})
    declared: dict[str, Mapping[str, Any]] = {}
    _declare(tools or [], declared, "tools")
    own = [_message(m, i, pictures, declared) for i, m in enumerate(messages)]
    choice, named = _tool_choice(tool_choice, declared)
    schema, strict = _response_format(response_format)
    calls: Literal["none", "auto", "required"] = "none"
    if choice == "required":
        calls = "required"
    elif choice != "none" and (
        schema is not None or any(t["function"].get("strict") is True for t in declared.values())
    ):
        calls = "auto"
    return Conversation(
        messages=own,
        template=Template(
            tools=list(tools) if tools else None,
            thinking=is_thinking,
            thinking_effort=effort,
            tool_choice=choice,
            response_format=response_format,
        ),
        pictures=pictures.found,
        schema=schema,
        strict=strict,
        calls=calls,
        callable_tools=tuple([declared[named]] if named else declared.values()),
        parallel=parallel is not False,
    )


def joined_text(parts: Any, where: str) -> str:
    """The text of a text, or of a list of text parts. Raises ApiError 400."""
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise bad("must be text or a list of text parts", where)
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise bad("must hold text parts alone", where)
    return "".join(map(str, texts))


def _thinking(
    thinking: Thinking | None, effort: str | None, options: Mapping[str, Any]
) -> tuple[bool, str]:
    """`thinking` says more than `reasoning_effort`, which says more than template options."""
    given = (thinking.effort if thinking else None) or effort
    if given is not None and (not isinstance(given, str) or given not in (*EFFORTS, "none")):
        raise bad(f"{given!r:.40} is not one of {', '.join(EFFORTS)}, none", "reasoning_effort")
    if thinking and thinking.type:
        is_on = thinking.type == "enabled"
    elif given is not None:
        is_on = given != "none"
    else:
        is_on = options.get("thinking", options.get("enable_thinking", True)) is not False
    return is_on, EFFORTS.get(given or "max", "max")


def _declare(tools: Any, declared: dict[str, Mapping[str, Any]], where: str) -> None:
    """Add declarations to those known, checked."""
    if not isinstance(tools, list):
        raise bad("must be a list", where)
    for i, tool in enumerate(tools):
        here = f"{where}[{i}]"
        if not isinstance(tool, Mapping):
            raise bad("must be an object", here)
        if tool.get("type") != "function":
            raise bad('type must be "function"', here)
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise bad("function is missing", here)
        name = function.get("name")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise bad(
                "function.name must be up to 256 letters, digits, _, - and ., and begin with a "
                "letter or _", here,
            )  # fmt: skip
        if name in declared:
            raise bad(f"{name!r} is declared twice", here)
        if not isinstance(function.get("parameters", {}), (Mapping, type(None))):
            raise bad("function.parameters must be a JSON schema object", here)
        declared[name] = tool


def _message(
    message: Mapping[str, Any], i: int, pictures: Pictures, declared: dict[str, Mapping[str, Any]]
) -> dict[str, Any]:
    where = f"messages[{i}]"
    role = message.get("role")
    if role not in ROLES:
        raise bad(f"role must be one of {', '.join(ROLES)}", where)
    own = dict(message) | {"role": "system" if role == "developer" else role}
    if message.get("tools") is not None:
        if role != "system" or message.get("content"):
            raise bad("only a system message without content can declare tools", f"{where}.tools")
        _declare(message["tools"], declared, f"{where}.tools")
        if not message["tools"]:
            raise bad("must not be empty", f"{where}.tools")
    elif message.get("content") is None and role != "assistant":
        raise bad("is missing", f"{where}.content")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise bad("is missing", f"{where}.tool_call_id")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise bad("must be a list", f"{where}.tool_calls")
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("id"), (str, type(None))):
            raise bad("must be objects with a text as their id", f"{where}.tool_calls")
    own["content"] = pictures.take(message.get("content"), role, f"{where}.content")
    return own


def _tool_choice(
    choice: str | Mapping[str, Any] | None, declared: Mapping[str, Any]
) -> tuple[str | None, str | None]:
    """What the template writes, and the one tool that must be called if the caller named it."""
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") != "function" or name not in list(declared):
            raise bad("names no function of `tools`", "tool_choice")
        return "required", name
    if choice not in (None, "auto", "none", "required"):
        raise bad(f"{choice!r:.40} is not one of auto, none, required", "tool_choice")
    if choice == "required" and not declared:
        raise bad("required needs tools", "tool_choice")
    return choice, None


def _response_format(wanted: Mapping[str, Any] | None) -> tuple[Mapping[str, Any] | None, bool]:
    """The schema of the answer and whether it is strict."""
    if wanted is None:
        return None, True
    kind = wanted.get("type")
    if kind not in FORMATS:
        raise bad(f"type must be one of {', '.join(FORMATS)}", "response_format")
    if kind == "text":
        return None, True
    if kind == "json_object":
        return {"type": "object"}, False
    given = wanted.get("json_schema")
    if not isinstance(given, Mapping):
        raise bad("json_schema is missing", "response_format")
    if not isinstance(given.get("name"), str) or not given["name"]:
        raise bad("json_schema.name is missing", "response_format")
    if not isinstance(given.get("schema"), Mapping):
        raise bad("json_schema.schema must be an object", "response_format")
    if not isinstance(given.get("strict", True), (bool, type(None))):
        raise bad("json_schema.strict must be true or false", "response_format")
    return given["schema"], given.get("strict") is not False
