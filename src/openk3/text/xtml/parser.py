"""Model output back to a message: incremental, forgiving of malformed structure, lossless.

The grammar of a completion, which begins inside the channel that the prompt opened:

    reasoning CLOSE(think) OPEN(response) text CLOSE(response) [OPEN(tools) call+ CLOSE(tools)]
    CLOSE(message) <|end_of_msg|>

Models break it in known ways; each is read as what was meant:

    think not closed before response or tools           the next channel closes it
    CLOSE(think) without its sep                        closes all the same
    think skipped, the answer ended by CLOSE(response)  what came was the answer (delta `answer`)
    answer ended by CLOSE(message) alone                a closed message
    the prompt's opener repeated, even spelled out      dropped
    text between channels                               content; mere white space is layout
    tool calls nobody declared, elements not closed     calls like any other

Markup that fits nowhere is text and stays in the content. Fed token ids, only real special tokens
are markup; in text, a body that spells a closing tag cannot be told from one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from openk3.text.special_tokens import CLOSE, END_OF_MSG, OPEN, SEP
from openk3.text.tokenizer import Tokenizer
from openk3.text.xtml import markup
from openk3.text.xtml.argument_writer import ArgumentWriter
from openk3.text.xtml.grammar import (
    BETWEEN,
    BODY,
    CALL,
    CLOSES,
    CLOSES_AT_START,
    END,
    MAX_TAG_CHARS,
    OPENS,
    OPENS_AT_START,
    REQUIRED,
    RESPONSE,
    SPELLED,
    THINK,
    TOOLS,
    VALUE,
)
from openk3.text.xtml.lexer import Item, Lexer
from openk3.text.xtml.message import Accumulator, Delta


def parse(
    source: str | bytes | Sequence[int],
    *,
    tokenizer: Tokenizer | None = None,
    thinking: bool = True,
) -> dict[str, Any]:
    """One message from a completion, or from a whole rendered message.

    Args:
        source: token ids (exact) or text. It may end anywhere.
        tokenizer: needed for ids.
        thinking: the prompt ended inside the think channel; else inside the response.

    Returns:
        `{"role", "content"}`, with `reasoning_content` and `tool_calls` where there are any. Call
        arguments are JSON text, cut short where the source is.
    """
    parser = StreamParser(tokenizer, thinking=thinking)
    parser.feed(source)
    parser.finish()
    return parser.message


class StreamParser:
    """Parses output as it arrives. However it is cut, the deltas add up to the same message.

    Args:
        tokenizer: needed to feed ids.
        thinking: the prompt ended inside the think channel; else inside the response.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, *, thinking: bool = True):
        self._lexer = Lexer(tokenizer)
        self._accumulator = Accumulator()
        self._deltas: list[Delta] = []
        self._state = THINK if thinking else RESPONSE
        self._at_start = True
        self._tag: tuple[str, str] | None = None  # marker and the text since, until its sep
        self._waiting = ""  # text that may yet turn out to be an opener or mere layout
        self._is_stray = False  # content has begun between two tags
        self._num_calls = 0
        self._arguments = ArgumentWriter()

    @property
    def done(self) -> bool:
        """Whether the message was closed; what follows is ignored."""
        return self._state == END

    @property
    def thinking(self) -> bool:
        """Whether the think channel is open."""
        return self._state == THINK

    @property
    def message(self) -> dict[str, Any]:
        """The message so far, as `parse` returns it."""
        return self._accumulator.message()

    def feed(self, piece: int | Sequence[int] | str | bytes) -> list[Delta]:
        """Deltas that `piece` completes.

        Args:
            piece: one id, some ids, text, or UTF-8 bytes, cut anywhere. Keep to one kind.
        """
        for item in self._lexer.feed(piece):
            self._item(item)
        return self._take()

    def finish(self) -> list[Delta]:
        """Deltas of what was held back, once the output has ended.

        A tag cut in its middle is dropped; an argument cut in its middle stays cut.
        """
        for item in self._lexer.finish():
            self._item(item)
        if self._tag and self._tag[0] == CLOSE:
            self._close(self._tag[1])
        self._tag = None
        self._release_waiting()
        if self._state == VALUE:
            self._argument_text(self._arguments.cut())
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        groups = groupby(deltas, key=lambda delta: (delta.kind, delta.index, delta.name))
        return [
            Delta(kind, "".join(delta.text for delta in group), index, name)
            for (kind, index, name), group in groups
        ]

    def _emit(self, delta: Delta) -> None:
        self._accumulator.add(delta)
        self._deltas.append(delta)

    # Items. A tag is collected from its marker to its sep; everything else is text.

    def _item(self, item: Item) -> None:
        if self.done:
            return
        if item.is_marker and self._at_start:
            self._release_waiting()  # a real marker cannot complete a spelled-out one
        if self._tag is not None:
            self._in_tag(item, *self._tag)
        elif item.is_marker and item.text in (OPEN, CLOSE):
            self._tag = (item.text, "")
        elif item.is_marker and item.text == END_OF_MSG:
            self._release_waiting()
            self._leave_channel(END)
        else:
            self._text(item.text)

    def _in_tag(self, item: Item, marker: str, written: str) -> None:
        if not item.is_marker:
            self._tag = (marker, written + item.text)
            self._give_up_hopeless(*self._tag)
            return
        self._tag = None
        if item.text == SEP:
            understood = self._open(written) if marker == OPEN else self._close(written)
            if not understood:
                self._text(marker + written + SEP)
            return
        if marker == OPEN or not self._close(written):
            self._text(marker + written)
        self._item(item)

    def _give_up_hopeless(self, marker: str, written: str) -> None:
        """Release collected text as soon as it cannot become a tag that is allowed here."""
        names = self._may_open() if marker == OPEN else self._may_close()
        if any(name.startswith(written) for name in names):
            return
        has_name = any(written.startswith(f"{name} ") for name in names)
        if marker == OPEN and has_name and len(written) < MAX_TAG_CHARS:
            return
        self._tag = None
        then = written.removeprefix(THINK)
        lacks_sep = marker == CLOSE and then not in ("", written) and not then[0].isalnum()
        if lacks_sep and self._close(THINK):
            self._text(then)
        else:
            self._text(marker + written)

    def _may_open(self) -> tuple[str, ...]:
        if self._state == CALL and not self._arguments.is_empty:
            return ("call",) if self._arguments.is_raw else ("argument", "call")
        return OPENS_AT_START if self._at_start else OPENS.get(self._state, ())

    def _may_close(self) -> tuple[str, ...]:
        names = CLOSES.get(self._state, ())
        if self._state == VALUE:
            return ("json" if self._arguments.is_raw else "argument", *names)
        return names + CLOSES_AT_START if self._at_start else names

    # Structure. `_open` and `_close` answer whether the tag means something here.

    def _open(self, written: str) -> bool:
        tag = markup.read_tag(written)
        if tag is None or tag[0] not in self._may_open():
            return False
        name, attributes = tag
        if name in REQUIRED and REQUIRED[name] not in attributes:
            return False
        self._release_waiting()
        self._enter(name, attributes)
        return True

    def _enter(self, name: str, attributes: dict[str, str]) -> None:
        self._at_start = self._is_stray = False
        if name == "message":
            for key in ("role", "name", "tool", "type"):
                if key in attributes:
                    self._emit(Delta("role", attributes[key], name=key))
            self._state = BETWEEN if attributes["role"] == "assistant" else BODY
        elif name == "call":
            self._leave_call()
            self._emit(Delta("call", attributes["tool"], index=self._num_calls))
            self._num_calls += 1
            self._arguments = ArgumentWriter()
            self._state = CALL
        elif name == "argument":
            kind = attributes.get("type", "string")
            self._argument_text(self._arguments.open(attributes["key"], kind))
            self._state = VALUE
        elif name == "json":
            self._argument_text(self._arguments.open_raw())
            self._state = VALUE
        else:
            self._state = {"think": THINK, "response": RESPONSE, "tools": TOOLS}[name]

    def _close(self, name: str) -> bool:
        if name not in self._may_close():
            return False
        self._release_waiting()
        self._at_start = self._is_stray = False
        if self._state == THINK and name == "response":
            self._emit(Delta("answer", self._accumulator.reasoning))
        if name in ("argument", "json"):
            self._argument_text(self._arguments.close())
            self._state = CALL
        elif name == "call":
            self._leave_call()
        else:
            self._leave_channel(END if name == "message" else BETWEEN)
        return True

    def _leave_call(self) -> None:
        if self._state == VALUE:
            self._argument_text(self._arguments.close())
        if self._state in (VALUE, CALL):
            self._argument_text(self._arguments.end())
            self._state = TOOLS

    def _leave_channel(self, state: str) -> None:
        self._leave_call()
        self._state = state

    # Text goes to the channel that is open; where none is, it waits until it proves to be content.

    def _text(self, text: str) -> None:
        is_between = self._state in (BETWEEN, TOOLS, CALL) and not self._is_stray
        if not is_between and not self._at_start:
            self._body(text)
            return
        self._waiting += text
        seen = self._waiting if self._at_start else self._waiting.lstrip()
        names = OPENS_AT_START if self._at_start else OPENS[self._state]
        for opener, name in SPELLED.items():
            if name in names and seen.startswith(opener):
                self._waiting = ""
                self._enter(name, {"role": "assistant"} if name == "message" else {})
                if rest := seen.removeprefix(opener):
                    self._text(rest)
                return
            if name in names and opener.startswith(seen):
                return
        if seen:
            self._release_waiting()

    def _release_waiting(self) -> None:
        text, self._waiting = self._waiting, ""
        if not text:
            return
        self._at_start = False
        if self._state not in (BETWEEN, TOOLS, CALL):
            self._body(text)
        elif text.strip():
            self._is_stray = True
            self._body(text)

    def _body(self, text: str) -> None:
        if self._state == VALUE:
            self._argument_text(self._arguments.value(text))
        else:
            self._emit(Delta("reasoning" if self._state == THINK else "content", text))

    def _argument_text(self, text: str) -> None:
        if text:
            self._emit(Delta("arguments", text, index=self._num_calls - 1))
