"""One pool of equal pages for both kinds of memory (K3 report §5.4.1).

The layers are dealt into groups of as many layers as there are Gated MLA layers; a page id stands
for one page in each layer of its group. A page holds page_tokens latents of one MLA layer, or one
KDA layer's state: S first (head by head), then the convolutions' inputs.

Legend: H heads, K = V head width, W taps, R latent width.
"""

import os
from collections.abc import Sequence
from math import prod
from typing import IO

import torch
from torch import Tensor

from openk3.config import ModelConfig
from openk3.engine.plan import Copy, Geometry, num_host_pages
from openk3.engine.transfer import on_device
from openk3.engine.types import EngineConfig
from openk3.errors import ConfigError, StorageError
from openk3.obs.free_memory import free_memory

ALIGN = 256  # bytes
CPU = torch.device("cpu")
UNKNOWN_FREE = 4 << 30
"""Bytes that are taken to be free where the system does not tell."""
CHECKPOINTS = 64
"""Of each sequence that runs, for which there is room beside sequences as long as can be."""


def _round_up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


class PageMemory:
    """The pool's tensors and the host tier's, with typed views for the layers.

    The pool has one page more than the geometry says: `scratch`, for rows that only fill a batch.
    """

    def __init__(
        self, model: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        attn = model.linear_attn
        self.dtype, self.device = dtype, device
        layers = range(model.num_hidden_layers)
        self.kda_layers = [i for i in layers if model.is_kda(i)]
        self.mla_layers = [i for i in layers if not model.is_kda(i)]
        self.hidden_width = 0
        if config.num_drafts and config.draft == "mtp":  # its latents, and a hidden state a state
            self.mla_layers.append(model.num_hidden_layers)
            self.hidden_width = model.hidden_size
        self.latent_width = model.kv_lora_rank + model.qk_rope_head_dim
        self.S_shape = (attn.num_heads, attn.head_dim, attn.head_dim)
        self.conv_shape = (3, attn.short_conv_kernel_size, attn.num_heads, attn.head_dim)
        self.S_bytes = _round_up(prod(self.S_shape) * 4, ALIGN)
        self.geometry = shape = self._cut(config, model.max_position_embeddings)
        self.scratch = shape.num_pages
        wish = "num_pages" if config.num_pages else "memory_bytes"
        pool_shape = shape.layers_per_group, shape.num_pages + 1, shape.page_bytes
        self.pool = _taken(pool_shape, device, f"a smaller {wish}")
        self.pool[:, self.scratch] = 0
        self._config = config
        num_host = num_host_pages(shape, config)
        self._host_shape = shape.layers_per_group, num_host, shape.page_bytes
        self._host: Tensor | None = None
        self._host_file = self._reserve()
        if self._host_file is None:
            self._require_host_memory()

    def _cut(self, config: EngineConfig, max_positions: int) -> Geometry:
        """Pages that hold a KDA layer's state, or page_tokens latents of an MLA layer."""
        beside_S = prod(self.conv_shape) + self.hidden_width
        state_bytes = self.S_bytes + beside_S * self.dtype.itemsize
        per_token = self.latent_width * self.dtype.itemsize
        enough = _round_up(-(-state_bytes // per_token), config.hash_block)
        page_tokens = config.page_tokens or enough
        page_bytes = _round_up(max(state_bytes, page_tokens * per_token), ALIGN)
        per_group = len(self.mla_layers)  # the MTP layer is one of them
        kda_groups = -(-len(self.kda_layers) // per_group)
        num_pages = config.num_pages
        if num_pages is None:
            num_pages = _affordable(config, page_bytes * per_group, self.device)
            if config.memory_bytes is None:
                longest = -(-max_positions // page_tokens) + (1 + CHECKPOINTS) * kda_groups
                num_pages = min(num_pages, config.max_running * longest)
        return Geometry(page_tokens, page_bytes, num_pages, kda_groups, per_group)

    def _host_pool(self) -> Tensor:
        """The host tier's pages, taken when they are first needed."""
        if self._host is None:
            file, shape = self._config.host_file, self._host_shape
            if file is not None:
                flat = torch.from_file(file, shared=True, size=prod(shape), dtype=torch.uint8)
                self._host = flat.view(shape)
            else:
                pinned = self.device.type == "cuda"
                self._host = _taken(shape, CPU, "a smaller host_bytes", pin_memory=pinned)
        return self._host

    def _require_host_memory(self) -> None:
        """The host tier is taken when pages first come to it, which is no time to find it too
        large. Raises ConfigError."""
        size, free = prod(self._host_shape), free_memory()
        if size and free is not None:
            free -= self.pool.nbytes if self.device.type == "cpu" else 0
            if size > free:
                raise ConfigError(
                    f"host_bytes ({self._config.host_bytes}) are more than the {max(free, 0)} that "
                    "are free beside the pool; give a smaller number, or a host_file"
                )

    def _reserve(self) -> IO[bytes] | None:
        """The host tier's file with all its blocks, locked: a disk that fills up later would end
        the process at a write, and two engines would overwrite each other's pages."""
        name, size = self._config.host_file, prod(self._host_shape)
        if name is None or size == 0:
            return None
        import fcntl  # no Windows has it, and no Windows needs it without this file

        try:
            file = open(name, "ab")  # noqa: SIM115 (it is locked as long as the engine lives)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if hasattr(os, "posix_fallocate"):  # macOS has none
                os.posix_fallocate(file.fileno(), 0, size)
        except BlockingIOError as error:
            raise StorageError(f"host_file {name} is in use by another engine") from error
        except OSError as error:
            raise StorageError(
                f"host_file {name}, {size} bytes: {error.strerror or error}"
            ) from error
        return file

    def drop_host(self) -> None:
        """Give the host tier's memory back, until a copy needs it again."""
        self._host = None

    def read_host(self, pages: Sequence[int]) -> bytes:
        """The bytes of host pages, in order."""
        return self._host_pool()[:, list(pages)].transpose(0, 1).numpy().tobytes()

    def write_host(self, pages: Sequence[int], data: bytes) -> None:
        """The opposite of `read_host`."""
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = flat.view(len(pages), len(self.pool), self.geometry.page_bytes)
        self._host_pool()[:, list(pages)] = rows.transpose(0, 1)

    def group_of(self, layer: int) -> int:
        """The KDA group of a KDA layer."""
        return self.kda_layers.index(layer) // self.geometry.layers_per_group

    def latents(self, layer: int) -> Tensor:
        """[num_pages + 1, page_tokens, R + rope] of an MLA layer."""
        pages = self.pool[self.mla_layers.index(layer)].view(self.dtype)
        used = self.geometry.page_tokens * self.latent_width
        return pages[:, :used].unflatten(1, (-1, self.latent_width))

    def states(self, layer: int) -> tuple[Tensor, Tensor]:
        """S [num_pages + 1, H, K, V] float32 and inputs [num_pages + 1, 3, W, H, K], of a layer."""
        pages = self.pool[self.kda_layers.index(layer) % self.geometry.layers_per_group]
        S = pages.view(torch.float32)[:, : prod(self.S_shape)]
        start = self.S_bytes // self.dtype.itemsize
        conv = pages.view(self.dtype)[:, start : start + prod(self.conv_shape)]
        return S.unflatten(1, self.S_shape), conv.unflatten(1, self.conv_shape)

    def hiddens(self) -> Tensor:
        """[num_pages + 1, d] hidden states that travel with states; in pages of the first group."""
        start = self.S_bytes // self.dtype.itemsize + prod(self.conv_shape)
        return self.pool[0].view(self.dtype)[:, start : start + self.hidden_width]

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with bytes that are NaN in every float type."""
        self._fill(pages, 255)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages: the state before the first token."""
        self._fill(pages, 0)

    def _fill(self, pages: Sequence[int], byte: int) -> None:
        if self.device.type == "cpu":
            for page in pages:
                self.pool.numpy()[:, page] = byte
        else:
            self.pool[:, on_device(pages, self.device)] = byte

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy pages, as if one after the other."""
        if self.device.type == "cpu":  # plain copies: indexing costs as much as a decoding step
            for copy in copies:
                target = self._tier(copy.target_tier).numpy()
                target[:, copy.target] = self._tier(copy.source_tier).numpy()[:, copy.source]
            return
        batch: list[Copy] = []
        written: set[tuple[str, int]] = set()
        touched: set[tuple[str, int]] = set()
        for copy in copies:
            source, target = (copy.source_tier, copy.source), (copy.target_tier, copy.target)
            if target in touched or source in written:
                self._copy_at_once(batch)
                batch, written, touched = [], set(), set()
            batch.append(copy)
            written.add(target)
            touched |= {source, target}
        self._copy_at_once(batch)

    def _copy_at_once(self, copies: Sequence[Copy]) -> None:
        for source_tier in ("pool", "host"):
            for target_tier in ("pool", "host"):
                tiers = (source_tier, target_tier)
                some = [c for c in copies if (c.source_tier, c.target_tier) == tiers]
                if some:
                    source, target = self._tier(source_tier), self._tier(target_tier)
                    where = on_device([c.target for c in some], target.device)
                    pages = source[:, on_device([c.source for c in some], source.device)]
                    target[:, where] = pages.to(target.device)

    def _tier(self, name: str) -> Tensor:
        return self.pool if name == "pool" else self._host_pool()


def _taken(
    shape: Sequence[int], device: torch.device, instead: str, pin_memory: bool = False
) -> Tensor:
    """Bytes of a pool, not initialised. Raises ConfigError for more than can be had."""
    size = prod(shape)
    try:
        if size < 1 << 62:  # beyond it torch fails in other ways
            flat = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pin_memory)
            return flat.view(*shape)
        reason = None
    except RuntimeError as error:  # what torch raises on a CPU; a GPU's error is a subclass
        reason = error
    raise ConfigError(
        f"{size} bytes of pages cannot be had on {device}: give {instead}"
    ) from reason


def _affordable(config: EngineConfig, page_id_bytes: int, device: torch.device) -> int:
    """Pages that memory_bytes, or half of the free memory, hold. Raises ConfigError for none."""
    free = config.memory_bytes
    if free is None and device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] // 2
    if free is None:
        free = (free_memory() or UNKNOWN_FREE) // 2
    num = free // page_id_bytes - 1
    if num < 2:
        raise ConfigError(
            f"{free} bytes hold {num + 1} pages of {page_id_bytes}; the engine needs 3 at least: "
            "give memory_bytes, or a smaller hash_block or page_tokens"
        )
    return num
