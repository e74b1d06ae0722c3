"""A conversation in K3's chat format: what was said, the pictures seen, and the next message."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from openk3._io import read_json
from openk3.cli.speak import Speaker
from openk3.errors import DataError, InputError
from openk3.text import xtml
from openk3.text.xtml.fields import get, text

if TYPE_CHECKING:
    from openk3.text.image import ImageInputs
    from openk3.text.tokenizer import Tokenizer

Message = dict[str, Any]


class Call(NamedTuple):
    """A tool the model wants to hear from."""

    tool: str
    arguments: str
    """JSON text, as the model wrote it."""


class Conversation:
    """Takes what people and tools say, and gives what the model says.

    Attributes:
        thinking: the model thinks before it speaks.
        messages: OpenAI-style messages so far; an image part carries its `inputs`.
        effort: low, high, max, or None to leave it to the model.
        was_cut: the last answer ended before the model closed its message.
    """

    def __init__(
        self,
        speaker: Speaker,
        options: Namespace,
        *,
        thinking: bool = True,
        effort: str | None = None,
        tools: Sequence[Message] = (),
        system: str | None = None,
    ) -> None:
        """options: how the model speaks, as `speak.add_options` reads it."""
        self._speaker, self._options = speaker, options
        self.thinking, self.effort, self._tools = thinking, effort, list(tools)
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self.restart()

    def restart(self) -> None:
        """Forget what was said and shown."""
        self.messages: list[Message] = [*self._system]
        self._unsent: list[Message] = []
        self.was_cut = False

    def show(self, path: Path) -> None:
        """Put a picture into the next message. Raises DataError; InputError for a blind model."""
        self._unsent.append({"type": "image", "inputs": self._speaker.look([path])})

    def say(self, words: str) -> None:
        """Add a message of the user."""
        content = [*self._unsent, {"type": "text", "text": words}]
        self.messages.append({"role": "user", "content": content})
        self._unsent = []

    def reply(self, call: Call, words: str) -> None:
        """Add what a tool answered."""
        self.messages.append({"role": "tool", "tool": call.tool, "content": words})

    def answer(self, show: Callable[[xtml.Delta], None]) -> list[Call]:
        """Add the model's next message, shown as it comes. Returns the tools it calls.

        A message that was cut calls none, because its last call may lack arguments. An interrupt
        keeps what was said until then; an error leaves the messages as they were.
        """
        images = _join(self.messages)
        segments = xtml.render(
            self.messages,
            tools=self._tools,
            thinking=self.thinking,
            thinking_effort=self.effort,
            image_prompts=images.prompts if images else None,
        )
        tokenizer = self._speaker.tokenizer
        parser = xtml.StreamParser(tokenizer, thinking=self.thinking)

        def take(token_id: int) -> None:
            for delta in parser.feed(token_id):
                show(delta)

        ids = tokenizer.encode_segments(segments)
        try:
            self._speaker.stream(ids, self._options, take, images)
        except KeyboardInterrupt:
            self._keep(parser, show)
            raise
        return self._keep(parser, show)

    def _keep(self, parser: xtml.StreamParser, show: Callable[[xtml.Delta], None]) -> list[Call]:
        for delta in parser.finish():
            show(delta)
        message = parser.message
        self.was_cut = not parser.done
        if self.was_cut:
            message.pop("tool_calls", None)
        self.messages.append(message)
        functions = [call["function"] for call in message.get("tool_calls", [])]
        return [Call(function["name"], function["arguments"]) for function in functions]


def can_chat(tokenizer: "Tokenizer") -> bool:
    """Whether a vocabulary has the tokens that the chat format is made of."""
    return tokenizer.can_chat


def read_tools(path: Path) -> list[Message]:
    """Tool declarations from a JSON file: a list of `{"type": "function", "function": {...}}`.

    Raises DataError naming the file and the field.
    """
    tools = read_json(path, DataError, kind=list)
    names: list[str] = []
    try:
        for i, tool in enumerate(tools):
            where = f"tools[{i}]"
            if get(tool, "type", where) != "function":
                raise InputError(f"{where}.type is {tool['type']!r}; allowed: function")
            function = get(tool, "function", where)
            names.append(text(get(function, "name", f"{where}.function"), f"{where}.function.name"))
            if names[-1] in names[:-1]:
                raise InputError(f"{where}.function.name {names[-1]!r} is declared twice")
    except InputError as error:
        raise DataError(f"{path}: {error}") from None
    return tools


def _join(messages: Sequence[Message]) -> "ImageInputs | None":
    """The pictures of all messages, in order."""
    parts = [part for message in messages if message["role"] == "user"
             for part in message["content"]]  # fmt: skip
    seen: list[ImageInputs] = [part["inputs"] for part in parts if part["type"] == "image"]
    if not seen:
        return None
    import numpy as np

    return seen[0]._replace(
        pixel_values=np.concatenate([one.pixel_values for one in seen]),
        grid_thws=np.concatenate([one.grid_thws for one in seen]),
        prompts=[prompt for one in seen for prompt in one.prompts],
    )
