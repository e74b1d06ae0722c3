"""Conversations: messages to a prompt, and the ids that follow it to channels.

The prompt is what K3's template writes (`openk3.text.xtml`), or the beginning of an answer that is
to be continued. Stop strings are looked for in the answer alone: they end neither a thought nor the
arguments of a call, and never cut markup.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openk3.engine.text_stream import Reader
from openk3.engine.types import Media
from openk3.errors import InputError
from openk3.text.image import ImageInputs, ImageProcessor
from openk3.text.tokenizer import Tokenizer
from openk3.text.xtml import Delta, Segment, StreamParser, markup, render
from openk3.text.xtml.lexer import MARKERS

Message = Mapping[str, Any]
READ = (None, *MARKERS)
"""Ordinary tokens and K3's markup; other special tokens, and ids without bytes, say nothing."""


@dataclass(frozen=True)
class Prompt:
    """What the engine is given, and how its answer is to be read."""

    ids: tuple[int, ...]
    """Compact: one media id a picture."""
    thinking: bool = False
    """The prompt ends inside the think channel."""
    media: Media | None = None
    num_tokens: int = 0
    """Positions it takes in the model, pictures at their full length."""
    num_pending: int = 0
    """Of these, the opened channel at the end, which usage does not count (as K3's own service)."""

    def with_ids(self, ids: tuple[int, ...]) -> "Prompt":
        """The same text in other tokens."""
        return replace(self, ids=ids, num_tokens=self.num_tokens + len(ids) - len(self.ids))


@dataclass(frozen=True)
class Template:
    """What a request says about the prompt besides its messages; see `xtml.render`."""

    tools: Sequence[Mapping[str, Any]] | None = None
    thinking: bool = True
    thinking_effort: str | None = "max"
    tool_choice: str | None = None
    response_format: Mapping[str, Any] | None = None


def chat_prompt(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    template: Template,
    *,
    processor: ImageProcessor | None = None,
    images: Sequence[Any] = (),
) -> Prompt:
    """The prompt of a conversation.

    Args:
        messages: OpenAI-style, as `xtml.render` takes them; the last one, if it is the assistant's
            and has `"partial": true`, is continued.
        images: pictures in the order of the messages' parts, as `ImageProcessor` takes them.
        processor: the model's; None for a model that sees no pictures.

    Raises:
        InputError: a message that cannot be rendered, a picture that nobody can look at, or a
            vocabulary without chat tokens.
        DataError: a picture that cannot be read.
    """
    if not tokenizer.can_chat:  # its markup would become ordinary text
        raise InputError(
            "this model's vocabulary has no chat tokens: it can only go on with a text "
            "(POST /v1/completions, LLM.generate)"
        )
    seen = _look(images, processor)
    last = messages[-1] if messages else {}
    is_partial = isinstance(last, Mapping) and last.get("partial") is True
    segments = render(
        messages[:-1] if is_partial else messages,
        tools=template.tools,
        thinking=template.thinking,
        thinking_effort=template.thinking_effort,
        tool_choice=template.tool_choice,
        response_format=template.response_format,
        image_prompts=seen.prompts if seen else None,
        add_generation_prompt=False,
    )
    stub, thinking = _continued(last, template.thinking) if is_partial else _opened(template)
    ids = tuple(tokenizer.encode_segments([*segments, *stub]))
    pending = markup.open_tag("think" if thinking else "response")
    num_pending = 0 if is_partial else len(tokenizer.encode_segments(pending))
    return replace(_prompt(ids, seen, processor), thinking=thinking, num_pending=num_pending)


def text_prompt(
    ids: Sequence[int],
    tokenizer: Tokenizer,
    *,
    processor: ImageProcessor | None = None,
    images: Sequence[Any] = (),
) -> Prompt:
    """The prompt of a text behind pictures; without either it begins after an end-of-text token, as
    in training. Raises as `chat_prompt`."""
    seen = _look(images, processor)
    shown = tokenizer.encode_segments([(text, True) for text in seen.prompts]) if seen else []
    ids = (*shown, *ids) or (tokenizer.eos_id,)
    return _prompt(ids, seen, processor)


def _opened(template: Template) -> tuple[list[Segment], bool]:
    channel = "think" if template.thinking else "response"
    stub = [*markup.open_tag("message", role="assistant"), *markup.open_tag(channel)]
    return stub, template.thinking


def _continued(message: Message, thinking: bool) -> tuple[list[Segment], bool]:
    """The beginning of an answer that stays open, and whether it stops within the thought."""
    content, thought = message.get("content") or "", message.get("reasoning_content") or ""
    if message.get("role") != "assistant":
        raise InputError("only an assistant message can be partial")
    if message.get("tool_calls") or not isinstance(content, str) or not isinstance(thought, str):
        raise InputError("a partial message holds text, and no tool calls")
    name = message.get("name")
    stub = markup.open_tag("message", role="assistant", **({"name": name} if name else {}))
    within = thinking and not content
    if thinking:
        stub += markup.open_tag("think") + markup.text(thought)
        stub += [] if within else markup.close_tag("think")
    if not within:
        stub += markup.open_tag("response") + markup.text(content)
    return stub, within


def _look(images: Sequence[Any], processor: ImageProcessor | None) -> ImageInputs | None:
    if not images:
        return None
    if processor is None:
        raise InputError("this model sees no pictures; send text alone")
    return processor(images)


def _prompt(
    ids: tuple[int, ...], seen: ImageInputs | None, processor: ImageProcessor | None
) -> Prompt:
    if seen is None or processor is None:
        return Prompt(ids, num_tokens=len(ids))
    rows = [int(t * h * w) // processor.merge_size**2 for t, h, w in seen.grid_thws]
    return Prompt(ids, media=_media(seen), num_tokens=len(ids) + sum(rows) - len(rows))


def _media(seen: ImageInputs) -> Media:
    """Digests cover the pixels as the model reads them, so equal pictures share a prefix."""
    digests, start = [], 0
    for grid in seen.grid_thws:
        end = start + int(grid.prod())
        digest = hashlib.blake2b(grid.tobytes(), digest_size=16)
        digest.update(seen.pixel_values[start:end].tobytes())
        digests.append(digest.digest())
        start = end
    return Media(seen.pixel_values, seen.grid_thws, tuple(digests))


class ChatReader(Reader):
    """Reads one choice: ids to deltas of reasoning, content and tool calls."""

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool, stops: Sequence[str] = ()) -> None:
        super().__init__(stops)
        self._tokenizer = tokenizer
        self._parser = StreamParser(tokenizer, thinking=thinking)

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        deltas: list[Delta] = []
        for token_id in ids:
            if self.stop is None:
                self.num_reasoning += self._parser.thinking
                known = self._tokenizer.knows(token_id)
                if known and self._tokenizer.special_name(token_id) in READ:
                    deltas += self._cut(self._parser.feed(token_id))
        return deltas

    def finish(self) -> list[Delta]:
        """Markup that was cut is dropped; a call that was cut stays cut."""
        if self.stop is not None:
            return []
        return [*self._cut(self._parser.finish()), *self._released()]

    def _cut(self, deltas: list[Delta]) -> list[Delta]:
        kept: list[Delta] = []
        for delta in deltas:
            if self.stop is not None:
                break
            if delta.kind in ("content", "answer"):
                text = self._stops.feed(delta.text)
                if text or delta.kind == "answer":
                    kept.append(Delta(delta.kind, text))
            elif delta.kind != "role":
                kept += [*self._released(), delta]
        return kept

    def _released(self) -> list[Delta]:
        text = self._stops.finish()
        return [Delta("content", text)] if text else []
