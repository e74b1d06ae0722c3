"""Messages to segments, exactly as K3's own template lays them out.

Order: tool declaration, thinking effort, messages, tool choice, response format, generation prefix.
Everything a person, tool or model wrote is an ordinary segment, so it cannot forge structure.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openk3.errors import InputError
from openk3.text.xtml import markup, notices
from openk3.text.xtml.arguments import read_arguments, typed
from openk3.text.xtml.content import ImageContent
from openk3.text.xtml.fields import get, text
from openk3.text.xtml.markup import Segment
from openk3.text.xtml.tool_results import Call, arrange

Message = Mapping[str, Any]

ROLES = ("system", "user", "assistant", "tool")


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | None = None,
    image_prompts: Sequence[str] | None = None,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """A conversation as `(text, is_special)` segments for `Tokenizer.encode_segments`.

    Args:
        messages: OpenAI-style dicts with `role` (system, user, assistant, tool) and `content` (text
            or a list of text and image parts); assistant messages may have `reasoning_content` and
            `tool_calls`, tool messages `tool_call_id`, system messages `tools` (added mid-way).
        tools: OpenAI-style declarations, written with sorted keys in the order given.
        thinking: assistant messages have a think channel, and the model is asked to open one.
        thinking_effort: low, high or max; None writes no effort message. Only with `thinking`.
        tool_choice: auto, none or required.
        response_format: `{"type": "text" | "json_object"}`, or `json_schema` with its schema.
        image_prompts: prompt text of each image part, in order. When given, each
            `<|kimi_image_placeholder|>` in user and system text stands for an image too.
        add_generation_prompt: end with the opened assistant message.

    Raises:
        InputError: a field with a value that cannot be rendered; the message names the field.
    """
    images = ImageContent(image_prompts)
    segments: list[Segment] = []
    if tools:
        segments += notices.declare_tools(tools)
    segments += notices.effort(thinking_effort, thinking)
    for rendered in _messages(messages, thinking, images):
        segments += rendered
    images.check_all_used()
    segments += notices.tool_choice(tool_choice)
    segments += notices.response_format(response_format)
    if add_generation_prompt:
        segments += markup.open_tag("message", role="assistant")
        segments += markup.open_tag("think" if thinking else "response")
    return segments


def _messages(
    messages: Sequence[Message], thinking: bool, images: ImageContent
) -> Iterator[list[Segment]]:
    calls: list[Call] = []
    num_results = 0
    run: list[tuple[int, Message]] = []
    for i, message in enumerate(messages):
        role = get(message, "role", f"messages[{i}]")
        if role not in ROLES:
            raise InputError(f"messages[{i}].role is {role!r}; allowed: {', '.join(ROLES)}")
        if role == "tool":
            run.append((i, message))
            continue
        yield from _results(run, calls, num_results, images)
        num_results += len(run)
        run = []
        if role == "assistant":
            calls, num_results = _calls(message, i), 0
            yield _assistant(message, i, thinking, images)
        else:
            yield _plain(message, i, role, images)
    yield from _results(run, calls, num_results, images)


def _results(
    run: list[tuple[int, Message]], calls: list[Call], num_before: int, images: ImageContent
) -> Iterator[list[Segment]]:
    for index, result in enumerate(arrange(run, calls, num_before), start=num_before + 1):
        where = f"messages[{result.position}].content"
        body = images.render(result.message.get("content") or "", where, placeholders=False)
        yield markup.message(body, role="tool", tool=result.tool, index=str(index))


def _plain(message: Message, i: int, role: str, images: ImageContent) -> list[Segment]:
    if role == "system" and message.get("tools"):
        return notices.declare_new_tools(message["tools"], f"messages[{i}].tools")
    content = get(message, "content", f"messages[{i}]")
    body = images.render(content, f"messages[{i}].content", placeholders=True)
    return markup.message(body, role=role, **_name(message, i))


def _name(message: Message, i: int) -> dict[str, str]:
    name = message.get("name")
    if name is None:
        return {}
    return {"name": text(name, f"messages[{i}].name")}


def _calls(message: Message, i: int) -> list[Call]:
    calls = message.get("tool_calls") or []
    names = []
    for j, call in enumerate(calls):
        where = f"messages[{i}].tool_calls[{j}]"
        function = get(call, "function", where)
        name = text(get(function, "name", f"{where}.function"), f"{where}.function.name")
        names.append(Call(call.get("id"), name))
    return names


def _assistant(message: Message, i: int, thinking: bool, images: ImageContent) -> list[Segment]:
    body: list[Segment] = []
    if thinking:
        reasoning = message.get("reasoning_content")
        reasoning = message.get("reasoning") if reasoning is None else reasoning
        reasoning = text(reasoning or "", f"messages[{i}].reasoning_content")
        body += markup.element("think", markup.text(reasoning if reasoning.strip() else ""))
    content = message.get("content") or ""
    response = images.render(content, f"messages[{i}].content", placeholders=False)
    body += markup.element("response", response)
    calls = [_call(call, i, j) for j, call in enumerate(message.get("tool_calls") or [])]
    if calls:
        body += markup.element("tools", [segment for call in calls for segment in call])
    return markup.message(body, role="assistant", **_name(message, i))


def _call(call: Message, i: int, j: int) -> list[Segment]:
    where = f"messages[{i}].tool_calls[{j}].function.arguments"
    function = call["function"]
    arguments = read_arguments(function.get("arguments"), where)
    body: list[Segment] = []
    if isinstance(arguments, str):
        body += markup.element("json", markup.text(arguments), type="object")
    else:
        for key, value in arguments.items():
            kind, written = typed(value, f"{where}.{key}")
            key = text(key, f"{where}: key {key!r}")
            body += markup.element("argument", markup.text(written), key=key, type=kind)
    return markup.element("call", body, tool=function["name"], index=str(j + 1))
