"""The system messages that K3's template writes by itself: tools, effort, tool choice, format.

Their wording is part of the model's input format and must not change by a character.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from openk3.errors import InputError
from openk3.text.xtml import markup
from openk3.text.xtml.arguments import dump_json
from openk3.text.xtml.fields import get
from openk3.text.xtml.markup import Segment

EFFORTS = ("low", "high", "max")
TOOL_CHOICES = ("auto", "none", "required")

_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_NEW_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{}\n```"
)
_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data "
    "without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


def declare_tools(tools: Any, where: str = "tools") -> list[Segment]:
    """The declaration of the tools of a request."""
    return _system("tool-declare", _TOOLS.format(_canonical(tools, where)))


def declare_new_tools(tools: Any, where: str) -> list[Segment]:
    """The declaration of tools that a system message adds in mid-conversation."""
    return _system("tool-declare", _NEW_TOOLS.format(_canonical(tools, where)))


def _system(kind: str, body: str) -> list[Segment]:
    return markup.message(markup.text(body), role="system", type=kind)


def _canonical(tools: Any, where: str) -> str:
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise InputError(f"{where} must be a list of declarations, not {type(tools).__name__}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InputError(f"{where}[{i}] must be an object, not {type(tool).__name__}")
    return dump_json(list(tools), where, canonical=True)


def effort(level: str | None, thinking: bool) -> list[Segment]:
    """The thinking-effort message; nothing without `thinking`."""
    if level is not None and level not in EFFORTS:
        raise InputError(f"thinking_effort is {level!r}; allowed: {', '.join(EFFORTS)}")
    return _system("thinking-effort", _EFFORT.format(level)) if thinking and level else []


def tool_choice(choice: str | None) -> list[Segment]:
    """The tool-choice message; nothing for auto."""
    if choice is not None and choice not in TOOL_CHOICES:
        raise InputError(f"tool_choice is {choice!r}; allowed: {', '.join(TOOL_CHOICES)}")
    return _system("tool-choice", _CHOICE[choice]) if choice in _CHOICE else []


def response_format(wanted: Mapping[str, Any] | None) -> list[Segment]:
    """The response-format message; nothing for text."""
    kind = get(wanted, "type", "response_format") if wanted is not None else "text"
    if kind not in ("text", "json_object", "json_schema"):
        raise InputError(
            f"response_format.type is {kind!r}; allowed: text, json_object, json_schema"
        )
    if kind == "text":
        return []
    body = _FORMAT.format(kind)
    if kind == "json_schema":
        where = "response_format.json_schema"
        schema = get(get(wanted, "json_schema", "response_format"), "schema", where)
        if not isinstance(schema, Mapping):
            raise InputError(f"{where}.schema must be an object, not {type(schema).__name__}")
        body += _SCHEMA.format(dump_json(dict(schema), f"{where}.schema", canonical=True))
    return _system("response-format", body)
