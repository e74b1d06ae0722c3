"""The markup itself: elements, attributes and their escapes.

    <|open|>tag key="value"<|sep|> body <|close|>tag<|sep|>

Only the markers are special tokens; tag names, attribute names and values are ordinary text, each
its own segment, because K3's BPE never merges across a segment border.
"""

import re

from openk3.text.special_tokens import CLOSE, END_OF_MSG, OPEN, SEP

Segment = tuple[str, bool]
"""`(text, is_special)`: special segments are encoded with special tokens, others never are."""

_ATTRIBUTE = r' ([^\s="<>]+)="([^"]*)"'
_ATTRIBUTES = re.compile(f"(?:{_ATTRIBUTE})*")
_ONE_ATTRIBUTE = re.compile(_ATTRIBUTE)


def open_tag(tag: str, **attributes: str) -> list[Segment]:
    """Segments of an opening tag; attributes in the order given."""
    segments: list[Segment] = [(OPEN, True), (tag, False)]
    for name, value in attributes.items():
        segments += [(f" {name}", False), ('="', False), *text(escape(value)), ('"', False)]
    return [*segments, (SEP, True)]


def close_tag(tag: str) -> list[Segment]:
    """Segments of a closing tag."""
    return [(CLOSE, True), (tag, False), (SEP, True)]


def text(body: str) -> list[Segment]:
    """Segments of body text: one, or none when it is empty."""
    return [(body, False)] if body else []


def element(tag: str, body: list[Segment], **attributes: str) -> list[Segment]:
    """Segments of a whole element."""
    return open_tag(tag, **attributes) + body + close_tag(tag)


def message(body: list[Segment], **attributes: str) -> list[Segment]:
    """Segments of a whole message, which the end-of-message token follows."""
    return [*element("message", body, **attributes), (END_OF_MSG, True)]


def escape(value: str) -> str:
    """An attribute value as it is written between quotes. Bodies are never escaped."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """The attribute value that `escape` wrote."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


def read_tag(written: str) -> tuple[str, dict[str, str]] | None:
    """Name and attributes of the text between open marker and sep; None if it is not a tag."""
    name, _, _ = written.partition(" ")
    rest = written[len(name) :]
    if not _ATTRIBUTES.fullmatch(rest):
        return None
    return name, {key: unescape(value) for key, value in _ONE_ATTRIBUTE.findall(rest)}
