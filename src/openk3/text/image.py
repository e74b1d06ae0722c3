"""Pictures to what the model reads: patches, their grid, and the text that announces them.

K3's own preprocessing: never enlarged, shrunk only to fit the limits, transparency over a
chessboard, padded with black to whole tokens, then scaled to [-1, 1] and cut into patches.

Legend: N patches of all pictures, P patch side in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from openk3._io import read_json
from openk3.errors import ConfigError
from openk3.text.image_file import check_mode, open_image, pillow
from openk3.text.special_tokens import MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageInputs", "ImageProcessor", "image_prompt", "open_image"]

CONFIG_NAME, CONFIG_KEY = "preprocessor_config.json", "media_proc_cfg"
SQUARE, WHITE, GREY = 8, 255, 180  # the chessboard, white at the top left
_FIXED = {
    "fixed_output_tokens": None,
    "transparent_bg_fill_stage": "after_resize",
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": SQUARE,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": WHITE,
        "chessboard_gray_value": GREY,
    },
}


def image_prompt(width: int, height: int) -> str:
    """The text that stands for a picture of this original size; encode it with specials enabled."""
    return f"{MEDIA_BEGIN}image {width}x{height}{MEDIA_CONTENT}{MEDIA_PAD}{MEDIA_END}"


class ImageInputs(NamedTuple):
    """What the model reads of some pictures."""

    pixel_values: np.ndarray
    """[N, 3, P, P] float32 in [-1, 1] (channel, row, column), patches row by row."""
    grid_thws: np.ndarray
    """[items, 3] int64: frames (1), rows and columns of patches."""
    prompts: list[str]
    """One per picture, as `xtml.render(image_prompts=)` takes them."""


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """K3's image preprocessing; the defaults are the published ones."""

    patch_size: int = 14
    """Pixels along one side of a patch."""
    merge_size: int = 2
    """Patches along one side of a token."""
    max_patches: int = 65536
    """Larger pictures shrink to about this many patches."""
    max_side: int = 512
    """Most patches along one side."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Subtracted from each channel in [0, 1]."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Then divided by."""

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_size", "max_patches", "max_side"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} ({value!r}) must be an integer of at least 1")
        for name in ("mean", "std"):
            value = getattr(self, name)
            numbers = isinstance(value, tuple) and all(isinstance(v, int | float) for v in value)
            if not numbers or len(value) != 3 or (name == "std" and not all(value)):
                raise ConfigError(f"{name} ({value!r}) must be three numbers, std's not 0")
        if self.max_side % self.merge_size:
            raise ConfigError(
                f"max_side ({self.max_side}) must be a multiple of merge_size ({self.merge_size})"
            )

    @classmethod
    def load(
        cls, folder: str | Path, *, patch_size: int = 14, merge_size: int = 2
    ) -> ImageProcessor:
        """As a model folder's preprocessor_config.json says.

        A folder without one is taken to want K3's limits and the sizes given here, which stand in
        the model's vision config. Raises ConfigError naming the file and key.
        """
        path = Path(folder) / CONFIG_NAME
        if not path.is_file():
            return cls(patch_size=patch_size, merge_size=merge_size)
        published = read_json(path, ConfigError)
        try:
            return cls.from_hf(published)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_hf(cls, published: Mapping[str, Any]) -> ImageProcessor:
        """Read a published preprocessor_config.json. Raises ConfigError naming the key."""
        config = published.get(CONFIG_KEY) if isinstance(published, Mapping) else None
        if not isinstance(config, Mapping):
            raise ConfigError(f"{CONFIG_KEY} is missing; expected K3's image preprocessing")
        for key, value in _FIXED.items():
            if config.get(key, value) != value:
                raise ConfigError(f"{CONFIG_KEY}.{key} is {config[key]!r}; only {value!r} is known")
        fields = {key: config[name] for key, name in _PUBLISHED.items() if name in config}
        for key in ("mean", "std"):
            if isinstance(fields.get(key), list):
                fields[key] = tuple(fields[key])
        return cls(**fields)

    def to_hf(self) -> dict[str, Any]:
        """The published preprocessor_config.json."""
        own = {name: getattr(self, key) for key, name in _PUBLISHED.items()}
        listed = {name: list(v) if isinstance(v, tuple) else v for name, v in own.items()}
        return {CONFIG_KEY: listed | _FIXED}

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels that a picture is resized to."""
        side, limit = self.patch_size, self.max_side * self.patch_size
        patches = max(1, width // side) * max(1, height // side)
        scale = min(1.0, math.sqrt(self.max_patches / patches), limit / width, limit / height)
        return min(max(1, int(width * scale)), limit), min(max(1, int(height * scale)), limit)

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """(1, rows, columns): patches of a picture of this original size."""
        token = self.patch_size * self.merge_size
        across, down = (
            -(-pixels // token) * self.merge_size for pixels in self.size(width, height)
        )
        return 1, down, across

    def num_tokens(self, width: int, height: int) -> int:
        """Positions that a picture of this original size takes in the model."""
        _, down, across = self.grid(width, height)
        return (down // self.merge_size) * (across // self.merge_size)

    def __call__(self, images: Sequence[Image | str | Path | bytes]) -> ImageInputs:
        """Prepare pictures: decoded ones, paths, or bytes of files. Raises DataError naming one."""
        patches, grids, prompts = [self._none()], [], []
        for i, source in enumerate(images):
            image = open_image(source) if isinstance(source, str | Path | bytes) else source
            check_mode(image, getattr(image, "filename", "") or f"image {i}")
            patches.append(self.patches(image))
            grids.append(self.grid(*image.size))
            prompts.append(image_prompt(*image.size))
        values = self.normalise(np.concatenate(patches))
        return ImageInputs(values, np.array(grids, np.int64).reshape(-1, 3), prompts)

    def patches(self, image: Image) -> np.ndarray:
        """A decoded picture's patches [N, 3, P, P] uint8, resized and padded, row by row."""
        _, down, across = self.grid(*image.size)
        side = self.patch_size
        pixels = _resized_rgb(image, self.size(*image.size))
        padded = np.zeros((down * side, across * side, 3), np.uint8)
        padded[: pixels.shape[0], : pixels.shape[1]] = pixels
        cut = padded.reshape(down, side, across, side, 3).transpose(0, 2, 4, 1, 3)
        return cut.reshape(-1, 3, side, side)

    def normalise(self, patches: np.ndarray) -> np.ndarray:
        """patches [N, 3, P, P] uint8 -> (x / 255 - mean) / std, float32."""
        unit = (np.arange(256) / 255.0).astype(np.float32)
        mean, std = np.array([self.mean, self.std], np.float32)[..., None]
        values = (unit - mean) * (1 / std)
        out = np.empty(patches.shape, np.float32)
        for channel in range(3):
            out[:, channel] = values[channel][patches[:, channel]]
        return out

    def _none(self) -> np.ndarray:
        return np.empty((0, 3, self.patch_size, self.patch_size), np.uint8)


_PUBLISHED = {
    "patch_size": "patch_size",
    "merge_size": "merge_kernel_size",
    "max_patches": "in_patch_limit",
    "max_side": "patch_limit_on_one_side",
    "mean": "image_mean",
    "std": "image_std",
}


def _resized_rgb(image: Image, size: tuple[int, int]) -> np.ndarray:
    """[height, width, 3] uint8; transparency is laid over the chessboard after resizing."""
    bicubic = pillow().Resampling.BICUBIC
    if not image.has_transparency_data:
        return np.asarray(image.convert("RGB").resize(size, bicubic))
    rgba = np.asarray(image.convert("RGBA").resize(size, bicubic)).astype(np.float32)
    colour, alpha = rgba[..., :3], rgba[..., 3:] / np.float32(255)
    return (colour * alpha + _chessboard(*size) * (1 - alpha)).astype(np.uint8)


def _chessboard(width: int, height: int) -> np.ndarray:
    """[height, width, 1] float32."""
    rows, columns = np.arange(height) // SQUARE, np.arange(width) // SQUARE
    dark = (rows[:, None] + columns) % 2 == 1
    return np.where(dark, GREY, WHITE).astype(np.float32)[..., None]
