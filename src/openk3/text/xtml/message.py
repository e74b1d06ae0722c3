"""What parsing yields: deltas as they come, and the message they add up to."""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["role", "reasoning", "content", "answer", "call", "arguments"]


@dataclass(frozen=True, slots=True)
class Delta:
    """One increment of a message.

    Attributes:
        kind: `reasoning` and `content` add text to their channel; `call` begins tool call `index`
            of the tool `text`; `arguments` adds JSON text to call `index`. `answer` means that what
            went out as reasoning was the answer (the model skipped its think channel): `text` is
            all of it, the reasoning so far is void. `role` gives an attribute of the message.
        text: the text; of a `role` delta the attribute's value.
        index: tool call, from 0.
        name: of a `role` delta, which attribute: role, name, tool or type.
    """

    kind: Kind
    text: str
    index: int = 0
    name: str = ""


class Accumulator:
    """Adds deltas up to an OpenAI-style message dict, the form that `render` takes."""

    def __init__(self) -> None:
        self._attributes = {"role": "assistant"}
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def add(self, delta: Delta) -> None:
        """Take in one delta."""
        if delta.kind == "role":
            self._attributes[delta.name] = delta.text
        elif delta.kind == "reasoning":
            self._reasoning.append(delta.text)
        elif delta.kind == "content":
            self._content.append(delta.text)
        elif delta.kind == "answer":
            self._reasoning.clear()
            self._content.append(delta.text)
        elif delta.kind == "call":
            self._calls.append((delta.text, []))
        else:
            self._calls[delta.index][1].append(delta.text)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    def message(self) -> dict[str, Any]:
        """The message so far. Absent channels have no key, except `content`, which is then ""."""
        message: dict[str, Any] = {**self._attributes, "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": name, "arguments": "".join(pieces)}}
                for name, pieces in self._calls
            ]
        return message
