"""XTML, K3's chat format: messages to token segments, and model output back to messages."""

from openk3.text.xtml.markup import Segment
from openk3.text.xtml.message import Accumulator, Delta
from openk3.text.xtml.parser import StreamParser, parse
from openk3.text.xtml.render import render

__all__ = ["Accumulator", "Delta", "Segment", "StreamParser", "parse", "render"]
