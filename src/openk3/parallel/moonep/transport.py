"""What the dispatcher asks of whatever moves its data, and the facts of one layer's rows.

Legend: T tokens, k choices, L latent width, R ranks, E experts, B = E / R, N rows here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from openk3.parallel.moonep.token_map import Layout, TokenMap


@dataclass(kw_only=True)
class Route:
    """How one layer's tokens travel, kept from the forward to the backward pass: tables only."""

    layout: Layout
    weights: Tensor
    """[N] float32: the router weight of each row."""
    ends: Tensor
    """[2 B] int32: end of each group of rows, own experts first, then redundant ones."""
    num_own: int | None
    """Rows of own experts; None where the host does not know."""


class Pending(Protocol):
    """Something under way; its result may be used after `wait`."""

    def wait(self) -> object:
        """Return once it is done."""
        ...


class Then:
    """A `Pending` that does something when it is waited for."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.wait = wait


@dataclass
class Bytes:
    """Bytes this rank has sent to others, by purpose."""

    tokens: int = 0
    """Activations and their gradients, both ways."""
    tables: int = 0
    """Counts, rows and router weights."""
    experts: int = 0
    grads: int = 0
    """float32 gradients of redundant experts."""


class Transport(Protocol):
    """Moves tokens and experts among the ranks of one group. Every call is collective."""

    rank: int
    num_ranks: int
    align: int
    """A group's rows are a multiple of it."""

    def share_counts(self, load: Tensor) -> Tensor:
        """load [E] int64 of this rank -> [R, E] of all."""
        ...

    def open(self, layout: Layout, tokens: TokenMap, weights: Tensor) -> Any:
        """Tell every rank which rows it will get, with their weights [T, k] float32: a `Route`."""
        ...

    def scatter(self, route: Any, x: Tensor, room: int = 0) -> Tensor:
        """x [T, L] -> rows [N, L] grouped by expert, valid until the next call for `room` (0, 1),
        and room 1 until the next `gather`."""
        ...

    def gather(self, route: Any, rows: Tensor) -> Tensor:
        """rows [N, L] -> [T, L], the sum of each token's rows, added in float32."""
        ...

    def gather_values(self, route: Any, values: Tensor) -> Tensor:
        """values [N] float32 of rows -> [T, k] of pairs; 0 for padding."""
        ...

    def fetch_experts(self, route: Any, own: list[Tensor]) -> tuple[list[Tensor], Pending]:
        """own: three parameters [B, ..] -> those of the redundant experts, [copies, ..] each."""
        ...

    def grad_room(self, route: Any, own: list[Tensor]) -> list[Tensor]:
        """Three [copies, ..] float32 in which to stage the gradients of redundant experts."""
        ...

    def return_grads(self, route: Any, own: list[Tensor]) -> Pending:
        """Add what every rank has staged to the gradients `own` [B, ..] of its homes."""
        ...
