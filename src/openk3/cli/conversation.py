"""What a person and a model say in turns: messages in K3's chat format, or one plain text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from openk3._io import read_json
from openk3.engine.types import SamplingParams
from openk3.errors import DataError, InputError
from openk3.text import xtml
from openk3.text.xtml.fields import get, text

if TYPE_CHECKING:
    from openk3.engine.answers import Answer
    from openk3.engine.llm import LLM

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
        messages: OpenAI-style messages so far; an image part carries its `picture`.
        effort: low, high, max, or None to leave it to the model.
        was_cut: the last answer ended before the model closed its message,
        at_limit: because it was as long as it may be.
    """

    def __init__(
        self,
        llm: "LLM",
        params: SamplingParams,
        *,
        thinking: bool = True,
        effort: str | None = None,
        tools: Sequence[Message] = (),
        system: str | None = None,
    ) -> None:
        """params: how the model chooses its words."""
        self._llm, self._params = llm, params
        self.thinking, self.effort, self._tools = thinking, effort, list(tools)
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self.restart()

    def restart(self) -> None:
        """Forget what was said and shown."""
        self.messages: list[Message] = [*self._system]
        self._unsent: list[Message] = []
        self.was_cut = self.at_limit = False

    def show(self, path: Path) -> None:
        """Put a picture into the next message. Raises DataError; InputError for a blind model."""
        from openk3.text.image import open_image

        if self._llm.processor is None:
            raise InputError("this model sees no pictures; it has no vision tower")
        self._unsent.append({"type": "image", "picture": open_image(path)})

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
        from openk3.engine.chat import Template

        said = xtml.Accumulator()

        def take(_: int, delta: xtml.Delta) -> None:
            said.add(delta)
            show(delta)

        template = Template(self._tools, self.thinking, self.effort)
        try:
            [answer] = self._llm.chat(
                self.messages,
                self._params,
                template=template,
                images=_pictures(self.messages),
                on_delta=take,
            )
        except KeyboardInterrupt:
            self._keep(said.message(), None)
            raise
        return self._keep(said.message(), answer)

    def _keep(self, message: Message, answer: "Answer | None") -> list[Call]:
        end = self._llm.tokenizer.end_of_msg_id
        self.was_cut = answer is None or answer.ids[-1:] != [end]
        self.at_limit = answer is not None and answer.finish_reason == "length"
        if self.was_cut:
            message.pop("tool_calls", None)
        self.messages.append(message)
        functions = [call["function"] for call in message.get("tool_calls", [])]
        return [Call(function["name"], function["arguments"]) for function in functions]


def _pictures(messages: Sequence[Message]) -> list[Any]:
    """Of all messages, in order."""
    said = [message["content"] for message in messages if message["role"] == "user"]
    return [part["picture"] for parts in said for part in parts if part["type"] == "image"]


class PlainText:
    """A text that a person and a model write together.

    Attributes:
        ids: the text so far.
    """

    def __init__(self, llm: "LLM", params: SamplingParams) -> None:
        self._llm, self._params = llm, params
        self.ids: list[int] = []

    def go_on(self, words: str, show: Callable[[str], object]) -> None:
        """Add words, and how the model goes on, shown as it comes. An interrupt keeps what was
        written until then; an error leaves the text as it was."""
        encode, said = self._llm.tokenizer.encode, []

        def take(_: int, delta: xtml.Delta) -> None:
            said.append(delta.text)
            show(delta.text)

        ids = self.ids + encode(words)
        try:
            [answer] = self._llm.generate([ids], self._params, on_delta=take)
        except KeyboardInterrupt:
            self.ids = ids + encode("".join(said))
            raise
        self.ids = ids + answer.ids


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
