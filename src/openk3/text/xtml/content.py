"""Message content: text, or a list of text and image parts."""

from collections.abc import Sequence
from typing import Any

from openk3.errors import InputError
from openk3.text.xtml import markup
from openk3.text.xtml.fields import get, text
from openk3.text.xtml.markup import Segment

IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"


class ImageContent:
    """Hands out the image prompts in order and renders content that may hold images."""

    def __init__(self, prompts: Sequence[str] | None):
        self._prompts = prompts
        self._used = 0

    def render(self, content: Any, where: str, *, placeholders: bool) -> list[Segment]:
        """Segments of `content`; with `placeholders`, markers in plain text are images too."""
        if isinstance(content, str):
            return self._with_placeholders(content, where) if placeholders else markup.text(content)
        if not isinstance(content, Sequence):
            raise InputError(
                f"{where} must be text or a list of parts, not {type(content).__name__}"
            )
        segments: list[Segment] = []
        for i, part in enumerate(content):
            segments += self._part(part, f"{where}[{i}]")
        return segments

    def _part(self, part: Any, where: str) -> list[Segment]:
        kind = get(part, "type", where)
        if kind == "text":
            return markup.text(text(get(part, "text", where), f"{where}.text"))
        if kind in ("image", "image_url"):
            return [self._next(where)]
        raise InputError(f"{where}.type is {kind!r}; allowed: text, image, image_url")

    def _with_placeholders(self, content: str, where: str) -> list[Segment]:
        if self._prompts is None:
            return markup.text(content)
        first, *rest = content.split(IMAGE_PLACEHOLDER)
        segments = markup.text(first)
        for piece in rest:
            segments += [self._next(where), *markup.text(piece)]
        return segments

    def _next(self, where: str) -> Segment:
        prompts = self._prompts or ()
        if self._used >= len(prompts):
            raise InputError(f"{where} is an image, but image_prompts has only {len(prompts)}")
        self._used += 1
        return prompts[self._used - 1], True

    def check_all_used(self) -> None:
        """Raises InputError when there were more prompts than images."""
        if self._used < len(self._prompts or ()):
            raise InputError(
                f"image_prompts has {len(self._prompts or ())} entries, but the messages show "
                f"only {self._used} images"
            )
