"""MoonEP's moves through peers' memory: fixed shapes, one-sided, nothing read by the host.

A rank writes a token into the very row where it is computed; further copies on the same rank are
made there. Sums are made where the rows are and read by the token's rank. Barriers on the device
order the steps: whoever passes one may overwrite what others have read before it.

Legend: T tokens (at most S a rank), k choices, R ranks, E experts, B = E / R, N = S k rows and
padding, L latent width, F inner width.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from openk3.errors import InputError
from openk3.ops.triton_support import launch
from openk3.parallel.moonep import kernels, tiled
from openk3.parallel.moonep.memory import Carver, Memory, Region, SymmetricMemory
from openk3.parallel.moonep.sums import Groups, block_of, group
from openk3.parallel.moonep.token_map import Layout, TokenMap
from openk3.parallel.moonep.transport import Pending, Route, Then


@dataclass(frozen=True)
class Shapes:
    """All that fixes the memory of the transport."""

    num_experts: int
    top_k: int
    max_tokens: int
    """S, of any rank in any call."""
    latent: int
    inner: int
    dtype: torch.dtype = torch.bfloat16

    def rows(self, num_ranks: int) -> int:
        """N: S k rows and what aligning up to 2 B groups may add."""
        groups = 2 * self.num_experts // num_ranks
        return self.max_tokens * self.top_k + groups * (tiled.ALIGN - 1)


@dataclass(frozen=True)
class _Regions:
    counts: Region
    first_row: Region
    weights: Region
    values: Region
    rooms: tuple[Region, Region]
    slots: list[Region]
    staged: list[Region]


def _carve(shapes: Shapes, num_ranks: int, memory: Memory | None = None) -> tuple[_Regions, int]:
    cut, num_rows = Carver(memory), shapes.rows(num_ranks)
    block = shapes.num_experts // num_ranks
    wide, tall = (block, shapes.inner, shapes.latent), (block, shapes.latent, shapes.inner)
    regions = _Regions(
        cut.take(num_ranks, shapes.num_experts, dtype=torch.int64),
        cut.take(num_rows, dtype=torch.int32),
        cut.take(num_rows, dtype=torch.float32),
        cut.take(num_rows, dtype=torch.float32),
        (
            cut.take(num_rows, shapes.latent, dtype=shapes.dtype),
            cut.take(num_rows, shapes.latent, dtype=shapes.dtype),
        ),
        [cut.take(*shape, dtype=shapes.dtype) for shape in (wide, wide, tall)],
        [cut.take(*shape, dtype=torch.float32) for shape in (wide, wide, tall)],
    )
    return regions, cut.used


def memory_bytes(shapes: Shapes, num_ranks: int) -> int:
    """Bytes of symmetric memory of one rank: two row buffers, slots, staged gradients, tables."""
    return _carve(shapes, num_ranks)[1]


@dataclass(kw_only=True)
class SymmetricRoute(Route):
    tokens: TokenMap
    first_row: Tensor
    """[N] int32: the row in which each row's token arrives; -1 for rows of nobody."""
    sums: Groups
    """Rows by that row."""
    num_tokens: int
    top_k: int


class Symmetric:
    """A `Transport` over memory that all ranks of one NVLink domain can address."""

    align = tiled.ALIGN

    def __init__(self, shapes: Shapes, memory: Memory) -> None:
        """memory: `memory_bytes(shapes, R)` bytes on every rank."""
        self.shapes, self.memory = shapes, memory
        self.rank, self.num_ranks = memory.rank, memory.num_ranks
        self.regions = _carve(shapes, self.num_ranks, memory)[0]
        self.num_rows = shapes.rows(self.num_ranks)

    def share_counts(self, load: Tensor) -> Tensor:
        region, num_experts = self.regions.counts, load.numel()
        self.regions.first_row.here.fill_(-1)  # before the barrier: then others may announce
        launch(
            kernels.push_counts, (self.num_ranks,), load, region.peers, self.rank, E=num_experts,
            BLOCK=1024,
        )  # fmt: skip
        self.memory.barrier()
        return region.here.clone()

    def open(self, layout: Layout, tokens: TokenMap, weights: Tensor) -> SymmetricRoute:
        num_tokens, top_k = weights.shape
        self._require("tokens", num_tokens, num_tokens <= self.shapes.max_tokens)
        self._require("choices a token", top_k, top_k <= self.shapes.top_k)
        tables, pairs = self.regions, weights.numel()
        weights = weights.detach().float().contiguous()
        if pairs:
            launch(
                kernels.announce, (-(-pairs // 1024),), tokens.rank, tokens.row, tokens.first,
                weights, tables.first_row.here, tables.weights.here, tables.first_row.peers,
                tables.weights.peers, pairs, BLOCK=1024,
            )  # fmt: skip
        self.memory.barrier()
        first_row = tables.first_row.here.clone()
        used = first_row >= 0
        target = torch.where(used, first_row.long(), self.num_rows)
        return SymmetricRoute(
            layout=layout,
            weights=torch.where(used, tables.weights.here, 0.0),
            ends=layout.sizes[self.rank].cumsum(0).to(torch.int32),
            num_own=None,
            tokens=tokens,
            first_row=first_row,
            sums=group(target, self.num_rows),
            num_tokens=num_tokens,
            top_k=top_k,
        )

    def scatter(self, route: SymmetricRoute, x: Tensor, room: int = 0) -> Tensor:
        region, tokens = self.regions.rooms[room], route.tokens
        self._require("tokens of width", x.shape[1], x.shape[1] == self.shapes.latent)
        self._require("tokens of", x.dtype, x.dtype == self.shapes.dtype)
        self.memory.barrier()  # whoever still reads the room has queued that before
        if x.numel():
            launch(
                kernels.push_tokens, (tokens.rank.numel(),), x.contiguous(), tokens.rank,
                tokens.row, tokens.first, region.peers, L=x.shape[1], TOP_K=route.top_k,
                BLOCK=block_of(x.shape[1]),
            )  # fmt: skip
        self.memory.barrier()
        width, per_program = region.here.shape[1], 1 if x.is_cuda else 64
        launch(
            kernels.spread_copies, (-(-self.num_rows // per_program),), region.here,
            route.first_row, self.num_rows, L=width, BR=per_program, BLOCK=block_of(width),
        )  # fmt: skip
        return region.here

    def gather(self, route: SymmetricRoute, rows: Tensor) -> Tensor:
        region, tokens, width = self.regions.rooms[1], route.tokens, rows.shape[1]
        block = block_of(width)
        chunks = -(-width // block)
        launch(
            kernels.add_rows, (self.num_rows, chunks), rows, route.sums.order, route.sums.starts,
            region.here, L=width, BLOCK=block, ZERO=False,
        )  # fmt: skip
        self.memory.barrier()
        out = rows.new_empty(route.num_tokens, width)
        if out.numel():
            launch(
                kernels.pull_tokens, (route.num_tokens, chunks), out, tokens.rank, tokens.row,
                tokens.first, region.peers, L=width, TOP_K=route.top_k, BLOCK=block,
            )  # fmt: skip
        return out

    def gather_values(self, route: SymmetricRoute, values: Tensor) -> Tensor:
        region = self.regions.values
        region.here.copy_(values)
        self.memory.barrier()
        out = values.new_empty(route.num_tokens, route.top_k)
        if out.numel():
            launch(
                kernels.pull_values, (-(-out.numel() // 1024),), out, route.tokens.rank,
                route.tokens.row, region.peers, out.numel(), BLOCK=1024,
            )  # fmt: skip
        return out

    def fetch_experts(
        self, route: SymmetricRoute, own: list[Tensor]
    ) -> tuple[list[Tensor], Pending]:
        block = route.layout.block
        for w, slots in zip(own, self.regions.slots, strict=True):
            fits = w.shape == slots.here.shape and w.dtype == slots.here.dtype
            self._require("experts of", (w.dtype, list(w.shape)), fits)
            size = w[0].numel()
            launch(
                kernels.push_experts, (self.num_ranks * block, -(-size // 8192)),
                w.detach().contiguous(), slots.peers, route.layout.redundant, self.rank, B=block,
                SIZE=size, BLOCK=8192,
            )  # fmt: skip
        return [slots.here for slots in self.regions.slots], Then(self.memory.barrier)

    def grad_room(self, route: SymmetricRoute, own: list[Tensor]) -> list[Tensor]:
        return [staged.here for staged in self.regions.staged]

    def return_grads(self, route: SymmetricRoute, own: list[Tensor]) -> Pending:
        self.memory.barrier()
        slots = _slots_of(route.layout, self.rank)
        for grad, staged in zip(own, self.regions.staged, strict=True):
            size = grad[0].numel()
            launch(
                kernels.pull_grads, (len(grad), -(-size // 4096)), grad, staged.peers, slots,
                B=len(grad), R=self.num_ranks, SIZE=size, BLOCK=4096,
            )  # fmt: skip
        return Then()

    def _require(self, what: str, value: object, fits: bool) -> None:
        if not fits:
            raise InputError(
                f"{what} {value} do not fit the memory made for {self.shapes}; make the transport "
                "with Shapes that hold them"
            )


def _slots_of(layout: Layout, rank: int) -> Tensor:
    """[R, B]: the slot in which each rank holds own expert e of `rank`, or -1."""
    block = layout.block
    own = torch.arange(rank * block, (rank + 1) * block, device=layout.redundant.device)
    held = layout.redundant[:, :, None] == own  # [R, slot, B]
    return torch.where(held.any(1), held.to(torch.uint8).argmax(1), -1)


def over_nvlink(shapes: Shapes, group: dist.ProcessGroup, device: torch.device) -> Symmetric:
    """The transport of a group whose GPUs share one NVLink domain."""
    num_bytes = memory_bytes(shapes, group.size())
    return Symmetric(shapes, SymmetricMemory(group, num_bytes, device))
