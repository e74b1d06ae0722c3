"""Tool results: matched to the calls they answer, put in call order, numbered from 1."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from openk3.errors import InputError

Message = Mapping[str, Any]


class Call(NamedTuple):
    """One call of the last assistant message."""

    id: str | None
    name: str


class Result(NamedTuple):
    """A tool message as it is rendered. `position` is its place in the caller's list."""

    tool: str
    position: int
    message: Message


def arrange(
    run: Sequence[tuple[int, Message]], calls: Sequence[Call], num_before: int
) -> list[Result]:
    """Order a run of neighbouring tool messages and name the tool of each.

    If every `tool_call_id` belongs to a call, the results come in call order under the calls'
    names. Otherwise the caller's order stays, and the name is the message's `tool` or `name`, or
    that of the call at the same place.

    Args:
        run: `(position, message)` of each.
        calls: calls of the last assistant message.
        num_before: results since that message, before this run.

    Raises:
        InputError: a result whose tool nobody named.
    """
    matched = _match(run, calls)
    if matched is not None:
        order = sorted(range(len(run)), key=lambda i: matched[i])
        return [Result(calls[matched[i]].name, *run[i]) for i in order]
    return [
        Result(_name(message, calls, num_before + i, position), position, message)
        for i, (position, message) in enumerate(run)
    ]


def _match(run: Sequence[tuple[int, Message]], calls: Sequence[Call]) -> list[int] | None:
    """Index of the call that each result answers, or None if one answers no call."""
    places: dict[str, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        if call.id is not None:
            places[call.id].append(index)
    matched = []
    for _, message in run:
        candidates = places.get(message.get("tool_call_id") or "")
        if not candidates:
            return None
        # Clients that repeat an id mean its calls in turn.
        matched.append(candidates.pop(0) if len(candidates) > 1 else candidates[0])
    return matched


def _name(message: Message, calls: Sequence[Call], place: int, position: int) -> str:
    name = message.get("tool") or message.get("name")
    if name is None and place < len(calls):
        name = calls[place].name
    if not isinstance(name, str):
        raise InputError(
            f"messages[{position}]: the tool result names no tool; give a tool_call_id of the last "
            f"assistant message (it has {[call.id for call in calls]}), or `name`"
        )
    return name
