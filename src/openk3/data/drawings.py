"""Pictures with captions, drawn by rule: the data of the vision recipe.

Half of them show a shape ("a large red ring on grey"), half of them two digits ("digits 4 7"), at
places, sizes and noise of their own. Drawing i is a pure function of (seed, i), for one version of
Pillow and its built-in font.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from openk3._io import atomic_dir, derive_seed
from openk3.errors import DataError
from openk3.text.image_file import pillow

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

RECORDS = "captions.jsonl"
INKS = {
    "red": (216, 40, 40),
    "green": (36, 160, 60),
    "blue": (44, 84, 220),
    "yellow": (236, 204, 32),
    "purple": (150, 56, 190),
    "orange": (244, 136, 24),
}
PAPERS = {"white": (246, 246, 246), "grey": (128, 128, 128), "black": (14, 14, 14)}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
SIZES = {"small": (4, 5), "large": (8, 9)}
"""Half the extent of a shape in pixels, least and most."""
DIGITS = "0123456789"
SIDES = (24, 32)
"""Widths and heights of the pictures, in pixels."""


class Drawing(NamedTuple):
    """A picture and what it shows."""

    image: Image
    caption: str


def draw(seed: int, index: int) -> Drawing:
    """Drawing `index` of the series `seed`. Raises BackendError without Pillow."""
    rng = np.random.default_rng(derive_seed(seed, "drawing", index))
    width, height = (int(rng.choice(SIDES)) for _ in range(2))
    if index % 2:
        width = max(SIDES)  # two digits need it
    paper = str(rng.choice(list(PAPERS)))
    image = pillow().new("RGB", (width, height), PAPERS[paper])
    if index % 2:
        caption = _digits(image, rng, (20, 20, 20) if paper != "black" else (240, 240, 240))
    else:
        caption = f"{_shape(image, rng)} on {paper}"
    pixels = np.asarray(image).astype(np.float32)
    noisy = (pixels + rng.normal(0, 6, pixels.shape)).clip(0, 255).astype(np.uint8)
    return Drawing(pillow().fromarray(noisy), caption)


def _pen(image: Image) -> ImageDraw:
    from PIL import ImageDraw

    return ImageDraw.Draw(image)


def _shape(image: Image, rng: np.random.Generator) -> str:
    size, shape, ink = (str(rng.choice(list(names))) for names in (SIZES, SHAPES, INKS))
    low, high = SIZES[size]
    r = int(rng.integers(low, high + 1))
    x, y = (int(rng.integers(r + 1, side - r - 1)) for side in image.size)
    pen, box, colour = _pen(image), (x - r, y - r, x + r, y + r), INKS[ink]
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    elif shape == "triangle":
        pen.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill=colour)
    elif shape == "cross":
        arm = max(1, r // 3)
        pen.rectangle((x - r, y - arm, x + r, y + arm), fill=colour)
        pen.rectangle((x - arm, y - r, x + arm, y + r), fill=colour)
    else:
        pen.ellipse(box, outline=colour, width=max(2, r // 3))
    return f"a {size} {ink} {shape}"


@lru_cache
def _font(size: int):
    from PIL import ImageFont

    return ImageFont.load_default(size=size)


def _digits(image: Image, rng: np.random.Generator, ink: tuple[int, int, int]) -> str:
    digits = "".join(rng.choice(list(DIGITS), 2))
    font = _font(int(rng.integers(17, 21)))
    pen = _pen(image)
    left, top, right, bottom = (round(side) for side in pen.textbbox((0, 0), digits, font=font))
    x = int(rng.integers(1, max(2, image.width - (right - left)))) - left
    y = int(rng.integers(1, max(2, image.height - (bottom - top)))) - top
    pen.text((x, y), digits, font=font, fill=ink)
    return "digits " + " ".join(digits)


def drawings(seed: int, count: int) -> Iterator[Drawing]:
    """The first `count` drawings of a series."""
    return (draw(seed, index) for index in range(count))


def write_drawings(folder: str | Path, count: int, *, seed: int = 0) -> Path:
    """Write `count` PNG files and `captions.jsonl` ({"image": FILE, "text": CAPTION} a line).

    Returns the path of the records. Raises DataError when `folder` exists, StorageError when the
    disk is full; then there is no folder.
    """
    folder = Path(folder)
    if folder.exists():
        raise DataError(f"{folder} exists already; remove it or choose another folder")
    with atomic_dir(folder) as aside, open(aside / RECORDS, "w", encoding="utf-8") as records:
        for index, (image, caption) in enumerate(drawings(seed, count)):
            name = f"{index:06d}.png"
            image.save(aside / name)
            records.write(json.dumps({"image": name, "text": caption}) + "\n")
    return folder / RECORDS
