"""Where pictures stand among the tokens.

In text an item is one media id. In the model it takes as many positions as it has rows: the id is
repeated ("expanded"), and the embeddings there are replaced by the projector's rows. Positions need
no care beyond that, as the model encodes none.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from openk3.config import ModelConfig, VisionConfig
from openk3.errors import InputError

MAX_SIDE = 512  # patches; the published rotary table ends there


class Grid(NamedTuple):
    """Patches of one item: frames, rows, columns."""

    t: int
    h: int
    w: int

    @property
    def num_patches(self) -> int:
        return self.t * self.h * self.w

    def num_rows(self, config: VisionConfig) -> int:
        """Rows the text model receives: merged patches, frames averaged."""
        down, across = config.merge_kernel_size
        return (self.h // down) * (self.w // across)


def read_grids(grid_thws: Tensor, config: VisionConfig) -> tuple[Grid, ...]:
    """grid_thws [items, 3] integers (frames, rows, columns of patches), checked."""
    if grid_thws.ndim != 2 or grid_thws.shape[1] != 3 or grid_thws.is_floating_point():
        raise InputError(
            f"grid_thws must be integers [items, 3], not {grid_thws.dtype} {list(grid_thws.shape)}"
        )
    grids = tuple(Grid(*sides) for sides in grid_thws.tolist())
    down, across = config.merge_kernel_size
    for i, (t, h, w) in enumerate(grids):
        if not 1 <= t <= config.init_pos_emb_time:
            raise InputError(f"grid_thws[{i}] has {t} frames, not 1 to {config.init_pos_emb_time}")
        if not (0 < h <= MAX_SIDE and 0 < w <= MAX_SIDE) or h % down or w % across:
            raise InputError(
                f"grid_thws[{i}] is {h} x {w} patches; rows must be a multiple of {down}, columns "
                f"of {across}, both at most {MAX_SIDE}"
            )
    return grids


class Prompt(NamedTuple):
    """Token ids and what runs along with them."""

    input_ids: Tensor
    """[B, T]"""
    cu_seqlens: Tensor | None = None
    """[N + 1]"""
    valid: Tensor | None = None
    """[B, T]"""


def expand_media(input_ids: Tensor, grid_thws: Tensor, config: ModelConfig) -> Tensor:
    """Repeat the i-th media id as often as item i has rows.

    input_ids [T] or [1, T] int64, grid_thws [items, 3] -> [T'] or [1, T']. Raises InputError when
    the ids do not hold one media id per item.
    """
    if input_ids.ndim > 2 or (input_ids.ndim == 2 and input_ids.shape[0] != 1):
        raise InputError(
            f"expand_media takes ids [T] or [1, T], not {list(input_ids.shape)}: rows that grow "
            "differently are no longer one batch"
        )
    return input_ids.repeat_interleave(_repeats(input_ids, grid_thws, config), dim=-1)


def make_room(prompt: Prompt, grid_thws: Tensor, config: ModelConfig) -> Prompt:
    """The prompt with expanded ids: as it is when they are, expanded when they are compact."""
    ids, cu_seqlens, valid = prompt
    found = int((ids == config.media_placeholder_token_id).sum())
    if found == sum(rows_per_item(grid_thws, config)):
        return prompt
    if ids.shape[0] != 1 or found != len(grid_thws):
        raise InputError(
            f"input_ids hold {found} media ids for {len(grid_thws)} items of "
            f"{rows_per_item(grid_thws, config)} rows: give one id per row"
            + (" or one per item" if ids.shape[0] == 1 else " (a batch must be expanded)")
        )
    repeats = _repeats(ids, grid_thws, config)
    if cu_seqlens is not None:
        moved = torch.cat([repeats.new_zeros(1), repeats.cumsum(0)])
        cu_seqlens = moved[cu_seqlens.long()].to(cu_seqlens.dtype)
    if valid is not None:
        valid = valid.repeat_interleave(repeats, dim=-1)
    return Prompt(ids.repeat_interleave(repeats, dim=-1), cu_seqlens, valid)


def splice(x_BTD: Tensor, ids_BT: Tensor, rows_RD: Tensor, config: ModelConfig) -> Tensor:
    """Put the projector's rows at the media ids, in reading order; padding becomes zero."""
    x_BTD = x_BTD.masked_fill((ids_BT == config.pad_token_id)[..., None], 0)
    at = (ids_BT == config.media_placeholder_token_id)[..., None]
    return x_BTD.masked_scatter(at, rows_RD.to(x_BTD.dtype))


def rows_per_item(grid_thws: Tensor, config: ModelConfig) -> list[int]:
    """How many positions each item takes. Raises InputError for a model without eyes."""
    vision = require_vision(config)
    return [grid.num_rows(vision) for grid in read_grids(grid_thws, vision)]


def require_vision(config: ModelConfig) -> VisionConfig:
    """The vision config. Raises InputError for a text model."""
    if config.vision is None:
        raise InputError("this model has no vision tower (its config has no vision_config)")
    return config.vision


def _repeats(ids: Tensor, grid_thws: Tensor, config: ModelConfig) -> Tensor:
    """[T] int64: 1 for a token, the number of rows for an item's media id."""
    lengths = rows_per_item(grid_thws, config)
    at = ids.reshape(-1) == config.media_placeholder_token_id
    if int(at.sum()) != len(lengths):
        raise InputError(f"input_ids hold {int(at.sum())} media ids for {len(lengths)} items")
    repeats = torch.ones_like(at, dtype=torch.int64)
    repeats[at] = torch.tensor(lengths, dtype=torch.int64, device=ids.device)
    return repeats
