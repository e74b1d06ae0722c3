"""Opens picture files that may come from anywhere: checked before a pixel is decoded.

Only formats whose decoders are pure pixel readers are tried. What would have to be guessed (one of
several frames, ink colours, 16-bit values) is refused, each time by the file's name.
"""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from openk3.errors import BackendError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 89_478_485
"""Largest declared width x height; above it Pillow, too, speaks of a decompression bomb."""

MODES = frozenset(("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "La", "RGBa", "YCbCr"))
# what Pillow's decoders raise on damaged files
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)


def open_image(
    source: str | Path | bytes, *, name: str | None = None, max_pixels: int = MAX_PIXELS
) -> Image:
    """A decoded still picture, as stored: size, mode and transparency unchanged.

    source: a path or a file's bytes; `name` stands for it in messages. Raises DataError for a file
    that is missing, damaged, of no known format, larger than `max_pixels` by its header (nothing is
    decoded then), animated, or not of 8-bit grey or RGB; BackendError without Pillow.
    """
    name = name or ("image" if isinstance(source, bytes) else str(source))
    data = source if isinstance(source, bytes) else _read(Path(source), max_pixels)
    module = pillow()
    try:
        image = _open(data)
        refusal = _refusal(image, max_pixels)
        if refusal is None:
            image.load()
    except module.UnidentifiedImageError:
        raise DataError(f"{name} is none of {', '.join(FORMATS)}, or damaged") from None
    except (module.DecompressionBombError, module.DecompressionBombWarning):
        raise DataError(
            f"{name} declares more pixels than are decoded (at most {max_pixels} in all)"
        ) from None
    except _DAMAGE as error:
        reason = str(error) or type(error).__name__
        raise DataError(f"{name} is damaged or cut short: {reason}") from None
    if refusal is not None:
        raise DataError(f"{name} {refusal}")
    check_mode(image, name)
    return image


def check_mode(image: Image, name: str) -> None:
    """Raises DataError for pixels that are not 8-bit grey or RGB."""
    if image.mode not in MODES:
        what = "CMYK inks" if image.mode == "CMYK" else f"{image.mode} pixels"
        raise DataError(
            f"{name} has {what}; expected 8-bit grey or RGB, with or without transparency: save it "
            "as an sRGB PNG or JPEG"
        )


def pillow():
    """The module PIL.Image. Raises BackendError where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise BackendError("pictures need Pillow: pip install 'openk3[vision]'") from None
    return Image


def _read(path: Path, max_pixels: int) -> bytes:
    limit = 4 * max_pixels + (1 << 20)
    try:
        with path.open("rb") as file:  # a device or a growing file says nothing true of its size
            data = file.read(limit + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(data) > limit:
        raise DataError(f"{path} has more bytes than a picture may ({limit})")
    return data


def _open(data: bytes) -> ImageFile:
    image = pillow().open(io.BytesIO(data), formats=FORMATS)
    if image.format == "PNG":
        image.verify()  # checksums, which decoding does not look at
        image = pillow().open(io.BytesIO(data), formats=FORMATS)
    return image


def _refusal(image: ImageFile, max_pixels: int) -> str | None:
    """Why the header alone rules a file out."""
    width, height = image.size
    if width * height > max_pixels:
        return f"declares {width} x {height} pixels; at most {max_pixels} in all are decoded"
    # a JPEG with a preview or gain map beside it (MPO) shows its first picture
    if image.format != "MPO" and getattr(image, "is_animated", False):
        return "is animated; expected a still picture: save the frame you mean"
    return None
