"""Pictures in messages: data URLs to bytes, within limits, before anything is decoded."""

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any

from openk3.api.openai.errors import ApiError, bad
from openk3.errors import DataError
from openk3.text.image_file import open_image
from openk3.text.xtml.content import IMAGE_PLACEHOLDER

DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)


class Pictures:
    """Collects the pictures of one request in the order in which the template shows them."""

    def __init__(self, max_images: int) -> None:
        self.max_images = max_images
        self.found: list[bytes] = []
        self._last_tool = False

    def take(self, content: Any, role: str, where: str) -> Any:
        """A message's content as the template takes it. Raises ApiError 400 naming the part."""
        follows_tool, self._last_tool = self._last_tool, role == "tool"
        if isinstance(content, str):
            # typed, not shown: as a part it is text and nothing else
            is_text = IMAGE_PLACEHOLDER not in content
            return content if is_text else [{"type": "text", "text": content}]
        if not isinstance(content, list):
            return content
        before = len(self.found)
        parts = [self._part(part, f"{where}[{i}]") for i, part in enumerate(content)]
        if len(self.found) > before and role == "tool" and follows_tool:
            # results are sorted into the order of their calls, and pictures with them
            raise bad("of several neighbouring tool results, only the first can hold pictures",
                       where)  # fmt: skip
        return parts

    def _part(self, part: Any, where: str) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "video_url":
            raise bad("videos are not supported", where)
        if kind != "image_url":
            if kind != "text":
                raise bad("type must be text or image_url", where)
            return part
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, dict) else given
        if not isinstance(url, str):
            raise bad("image_url.url is missing", where)
        if len(self.found) == self.max_images:
            raise bad(f"more than {self.max_images} pictures", where)
        self.found.append(_bytes(url, where))
        return {"type": "image_url"}


def _bytes(url: str, where: str) -> bytes:
    lead = DATA_URL.match(url)
    if not lead:
        raise bad("a picture must be a data: URL (data:image/png;base64,...); this server "
                   "fetches none", where)  # fmt: skip
    try:
        return base64.b64decode(url[lead.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise bad("the data: URL is not valid base64", where) from None


def decode(pictures: Sequence[bytes], max_pixels: int) -> list[Any]:
    """Decoded pictures, of at most `max_pixels` together. Raises ApiError 400."""
    opened = []
    for i, data in enumerate(pictures):
        try:
            image = open_image(data, name=f"picture {i + 1}", max_pixels=max_pixels)
        except DataError as error:
            raise ApiError(400, str(error), "invalid_image", "messages") from None
        max_pixels -= image.width * image.height
        opened.append(image)
    return opened
