"""What is asked of a store behind the tiers, and what comes back (`openk3.engine.external`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from openk3.engine.cache.store import Kind


@dataclass(frozen=True)
class Piece:
    """A page of latents, or a checkpoint, of a prompt."""

    kind: Kind
    block: int
    """It ends with this block of the prompt (counted from 1)."""
    data: bytes


@dataclass(frozen=True)
class Wanted:
    """What a prompt lacks here. Counts are of blocks."""

    keys: Sequence[bytes]
    """Of its complete blocks."""
    limit: int
    """Blocks that can be hit."""
    whole: int
    """Blocks in whole pages that are here."""
    hit: int
    """Blocks that can be hit without a fetch."""
    states: frozenset[int]
    """Blocks at whose ends a state is here."""
    blocks_per_page: int
    state_pages: int
    room: int
    """Pages of the host tier."""
    num_bytes: dict[Kind, int]
