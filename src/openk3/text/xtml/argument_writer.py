"""The JSON text of a call's arguments, written piece by piece as the XTML values arrive."""

import json

from openk3.text.xtml.arguments import try_json


class ArgumentWriter:
    """Every method returns the JSON text that its input adds.

    Strings stream; other values wait for their end, because text that is not JSON is kept as a
    string. Literals are copied, not re-formatted: `1e2` and long integers stay as the model wrote
    them. The text of a call that was cut off need not be complete JSON.

    Attributes:
        is_empty: no argument was opened yet.
        is_raw: the call uses the JSON form, one text for the whole object.
    """

    def __init__(self) -> None:
        self.is_empty = True
        self.is_raw = False
        self._is_string = False
        self._literal: list[str] = []

    def open(self, key: str, kind: str) -> str:
        """Begin argument `key` of XTML type `kind`."""
        lead = "{" if self.is_empty else ", "
        self.is_empty = False
        self._is_string = kind == "string"
        self._literal = []
        return lead + _quote(key) + ": " + ('"' if self._is_string else "")

    def open_raw(self) -> str:
        """Begin the JSON form, which is copied."""
        self.is_empty, self.is_raw = False, True
        return ""

    def value(self, piece: str) -> str:
        """More text of the argument that is open."""
        if self.is_raw:
            return piece
        if self._is_string:
            return _quote(piece)[1:-1]
        self._literal.append(piece)
        return ""

    def close(self) -> str:
        """End the argument that is open."""
        if self.is_raw:
            return ""
        if self._is_string:
            return '"'
        literal = self.cut()
        return literal if try_json(literal)[0] else _quote(literal)

    def cut(self) -> str:
        """What is still unwritten when the output ends inside an argument."""
        return "".join(self._literal)

    def end(self) -> str:
        """End the call."""
        if self.is_raw:
            return ""
        return "{}" if self.is_empty else "}"


def _quote(piece: str) -> str:
    return json.dumps(piece, ensure_ascii=False)
