"""What a model says, on a terminal: thinking dimmed or folded, each tool call on its line."""

import sys

from openk3.text.xtml import Delta

CONTROLS = {*range(32), *range(127, 160)} - {ord("\t"), ord("\n")}
HARMLESS = {code: 0x2400 + code if code < 32 else 0xFFFD for code in CONTROLS}
"""Control characters, as the pictures that Unicode has of them."""


class Screen:
    """Writes one message as it comes: thinking dimmed or folded, each call on a line."""

    def __init__(self, *, fold: bool) -> None:
        self._fold, self._num_thought, self._kind = fold, 0, ""
        self._live = sys.stdout.isatty()
        self._dim = ("\x1b[2m", "\x1b[0m") if self._live else ("", "")

    def show(self, delta: Delta) -> None:
        """Write one increment."""
        if delta.kind == "reasoning" and self._fold:
            if self._live and not self._num_thought:
                write(f"{self._dim[0]}thinking ...{self._dim[1]}")
            self._num_thought += len(delta.text)
        elif delta.kind != "role":
            self._begin("content" if delta.kind == "answer" else delta.kind)
            say(delta.text)

    def end(self) -> None:
        """End the message."""
        self._begin("")

    def _begin(self, kind: str) -> None:
        """Lay out the border between two channels."""
        if kind == self._kind and kind != "call":
            return
        dim, plain = self._dim
        if self._num_thought:
            again = "\r\x1b[K" if self._live else ""
            write(f"{again}{dim}thinking: {self._num_thought:,} characters{plain}\n")
            self._num_thought = 0
        if self._kind == "reasoning":
            write(plain)
        if kind == "arguments":
            write(" ")
        elif self._kind:
            write("\n")
        write({"reasoning": f"{dim}thinking: ", "call": "call: "}.get(kind, ""))
        self._kind = kind


def say(words: str) -> None:
    """Print words of a model at once; to a terminal they cannot give orders."""
    write(words.translate(HARMLESS) if sys.stdout.isatty() else words)


def write(piece: str) -> None:
    """Print a piece of text at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()
