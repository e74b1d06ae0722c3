"""Which tag means something in which place: the tables that the parser runs on."""

from openk3.text.special_tokens import OPEN, SEP

THINK, RESPONSE, TOOLS = "think", "response", "tools"
BETWEEN = "between"
"""Inside a message and outside its channels."""
CALL = "call"
"""Inside a call and outside its arguments."""
VALUE = "value"
BODY = "body"
"""Inside a message that is not the assistant's."""
END = "end"

OPENS = {
    THINK: ("response", "tools"),
    RESPONSE: ("tools",),
    BETWEEN: ("think", "response", "tools"),
    TOOLS: ("call", "response"),
    CALL: ("argument", "json", "call"),
}
"""Place to the tags that may open there."""

CLOSES = {
    THINK: ("think", "response", "message"),
    RESPONSE: ("response", "message"),
    BETWEEN: ("think", "response", "tools", "message"),
    TOOLS: ("tools", "message"),
    CALL: ("call", "tools", "message"),
    VALUE: ("call", "tools", "message"),
    BODY: ("message",),
}
"""Place to the tags that may close there, besides the argument that is open."""

OPENS_AT_START = ("message", "think", "response", "tools")
CLOSES_AT_START = ("think",)
"""What else may come first of all: a whole message, or the prompt's opener once more."""

REQUIRED = {"message": "role", "call": "tool", "argument": "key"}
"""Tag to the attribute it is meaningless without."""

SPELLED = {
    f'{OPEN}message role="assistant"{SEP}': "message",
    **{f"{OPEN}{tag}{SEP}": tag for tag in (THINK, RESPONSE, TOOLS)},
}
"""Openers as a model may spell them in ordinary tokens."""

MAX_TAG_CHARS = 65_536
"""Text after an open marker that grows longer is not a tag."""
