"""MoonViT-V2 and its projector (K3 report §2.4): pictures as rows the text model can read.

    patches -> linear + position -> blocks of [ norm, 2-D rotary attention ; norm, MLP ] -> norm
            -> 2x2 neighbours joined, frames averaged -> two linear layers -> RMSNorm

An item (a picture, or up to four frames) attends to itself only: jointly over all its frames, in
both directions. Parameter names are the published ones.

Legend: N patches of all items, C width of the tower, H heads, D head width, P patch side in pixels,
R rows handed to the text model, d its width.
"""

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openk3.config import VisionConfig
from openk3.errors import InputError
from openk3.model.layers import linear
from openk3.model.media import Grid, expand_media, read_grids
from openk3.ops.norm import rms_norm_wide

__all__ = ["Projector", "VisionTower", "expand_media"]

ROTARY_BASE = 10000.0


class PositionTable(nn.Module):
    """A learned table over space, resized to each picture, plus fixed sines over time."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        side = config.init_pos_emb_height, config.init_pos_emb_width
        self.weight = nn.Parameter(torch.empty(*side, config.vt_hidden_size))

    def forward(self, grids: tuple[Grid, ...]) -> Tensor:
        """[N, C] in the table's dtype."""
        tables = {grid: self._table(grid) for grid in dict.fromkeys(grids)}
        return torch.cat([tables[grid] for grid in grids])

    def _table(self, grid: Grid) -> Tensor:
        table = self.weight
        if table.shape[:2] != (grid.h, grid.w):
            wide = _wide(table).permute(2, 0, 1)[None]
            resized = F.interpolate(wide, (grid.h, grid.w), mode="bilinear", align_corners=False)
            table = resized[0].permute(1, 2, 0).to(table.dtype)
        space = table.flatten(0, 1)
        if grid.t == 1:
            return space
        time = time_rows(grid.t, space.shape[1], space.device).to(space.dtype)
        return (space + time[:, None]).flatten(0, 1)


def time_rows(num_frames: int, dim: int, device: torch.device) -> Tensor:
    """[frames, dim] float32: sines, then cosines, of the frame number times 10000^(-2i / dim)."""
    half = dim // 2
    omega = ROTARY_BASE ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angles = torch.arange(num_frames, device=device)[:, None] * omega
    return torch.cat([angles.sin(), angles.cos()], 1)


class PatchEmbed(nn.Module):
    """A strided convolution, which is one matrix product per patch, and the position."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        side = config.patch_size
        self.proj = nn.Conv2d(3, config.vt_hidden_size, side, stride=side, bias=False)
        self.pos_emb = PositionTable(config)

    def forward(self, pixels_N3PP: Tensor, grids: tuple[Grid, ...]) -> Tensor:
        weight = self.proj.weight.flatten(1)
        return F.linear(pixels_N3PP.flatten(1).to(weight.dtype), weight) + self.pos_emb(grids)


def rotary_angles(grids: tuple[Grid, ...], head_dim: int, device: torch.device) -> Tensor:
    """[N, D / 2] float32: one angle per pair of adjacent channels, the same in every frame.

    Pair 2i turns by column * theta_i, pair 2i + 1 by row * theta_i; theta_i = 10000^(-4i / D).
    """
    power = torch.arange(0, head_dim, 4, device=device, dtype=torch.float32) / head_dim
    theta = 1.0 / ROTARY_BASE**power
    pieces = {}
    for grid in dict.fromkeys(grids):
        rows = torch.arange(grid.h, device=device).repeat_interleave(grid.w)
        columns = torch.arange(grid.w, device=device).repeat(grid.h)
        angles = torch.stack([columns[:, None] * theta, rows[:, None] * theta], -1)
        pieces[grid] = angles.flatten(1).repeat(grid.t, 1)
    return torch.cat([pieces[grid] for grid in grids])


def rotate(x_NHD: Tensor, angles: Tensor) -> Tensor:
    """Turn adjacent channel pairs by `angles` [N, D / 2], in float32."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = _wide(x_NHD).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
    return turned.flatten(-2).to(x_NHD.dtype)


def attend_items(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, lengths: list[int]) -> Tensor:
    """Attention in both directions within each item [N, H, D]; equal neighbours go together."""
    out, start = [], 0
    for length, run in groupby(lengths):
        items = len(list(run))
        rows = slice(start, start + items * length)
        q, k, v = (
            x[rows].unflatten(0, (items, length)).transpose(1, 2) for x in (q_NHD, k_NHD, v_NHD)
        )
        out.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
        start = rows.stop
    return torch.cat(out)


class WideNorm(nn.Module):
    """RMSNorm with the weight applied before the cast back; eps None is the dtype's own."""

    def __init__(self, dim: int, eps: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm_wide(x, self.weight, self.eps)


class TowerMLP(nn.Module):
    """fc1(gelu(fc0(x))), with the tanh form of GELU."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc0 = linear(config.vt_hidden_size, config.vt_intermediate_size)
        self.fc1 = linear(config.vt_intermediate_size, config.vt_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class TowerBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, inner = config.vt_hidden_size, config.qkv_hidden_size
        self.num_heads = config.vt_num_attention_heads
        self.norm0 = WideNorm(width)
        self.wqkv = linear(width, 3 * inner)
        self.wo = linear(inner, width)
        self.norm1 = WideNorm(width)
        self.mlp = TowerMLP(config)

    def forward(self, x_NC: Tensor, angles: Tensor, lengths: list[int]) -> Tensor:
        qkv = self.wqkv(self.norm0(x_NC)).unflatten(1, (3, self.num_heads, -1))
        q, k, v = qkv.unbind(1)
        a = attend_items(rotate(q, angles), rotate(k, angles), v, lengths)
        x_NC = x_NC + self.wo(a.flatten(1))
        return x_NC + self.mlp(self.norm1(x_NC))


class Encoder(nn.Module):
    """The blocks and the last norm."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.qkv_hidden_size // config.vt_num_attention_heads
        self.blocks = nn.ModuleList(TowerBlock(config) for _ in range(config.vt_num_hidden_layers))
        self.final_layernorm = WideNorm(config.vt_hidden_size)

    def forward(self, x_NC: Tensor, grids: tuple[Grid, ...]) -> Tensor:
        angles = rotary_angles(grids, self.head_dim, x_NC.device)
        lengths = [grid.num_patches for grid in grids]
        for block in self.blocks:
            x_NC = block(x_NC, angles, lengths)
        return self.final_layernorm(x_NC)


def merge_patches(x_NC: Tensor, grids: tuple[Grid, ...], kernel: tuple[int, int]) -> Tensor:
    """[R, 4, C]: the 2x2 windows of each item, row by row, averaged over its frames."""
    down, across = kernel
    merged = []
    for x, (t, h, w) in zip(x_NC.split([g.num_patches for g in grids]), grids, strict=True):
        windows = x.view(t, h // down, down, w // across, across, -1).transpose(2, 3)
        merged.append(windows.mean(0).flatten(2, 3).flatten(0, 1))
    return torch.cat(merged)


class VisionTower(nn.Module):
    """MoonViT-V2."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.encoder = Encoder(config)

    def forward(self, pixel_values: Tensor, grid_thws: Tensor) -> Tensor:
        """pixel_values [N, 3, P, P] (items one after another, patches row by row, normalised to
        [-1, 1]) and grid_thws [items, 3] -> [R, 4, C]. Raises InputError.
        """
        grids = read_grids(grid_thws, self.config)
        side, total = self.config.patch_size, sum(g.num_patches for g in grids)
        if pixel_values.shape != (total, 3, side, side) or not pixel_values.is_floating_point():
            raise InputError(
                f"pixel_values must be floats [{total}, 3, {side}, {side}] for these grid_thws, "
                f"not {pixel_values.dtype} {list(pixel_values.shape)}"
            )
        if not grids:
            raise InputError("grid_thws holds no item; leave pixel_values out instead")
        x = self.encoder(self.patch_embed(pixel_values, grids), grids)
        return merge_patches(x, grids, self.config.merge_kernel_size)


class Projector(nn.Module):
    """Merged patches [R, 4, C] -> rows of the text model's width [R, d]."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        down, across = config.merge_kernel_size
        joined = config.mm_hidden_size * down * across
        self.proj = nn.Sequential(
            linear(joined, joined), nn.GELU(), linear(joined, config.text_hidden_size)
        )
        self.post_norm = WideNorm(config.text_hidden_size, config.projector_ln_eps)

    def forward(self, merged: Tensor) -> Tensor:
        return self.post_norm(self.proj(merged.flatten(1)))


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
