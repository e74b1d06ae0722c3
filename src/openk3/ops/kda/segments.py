"""Planner: whether to cut long sequences into segments that run side by side on one GPU.

A scan is serial over 16-token tiles, and one head of one sequence keeps one multiprocessor busy.
With few heads and long sequences most of the GPU would idle; cutting costs a second pass (with a
state twice as wide) and a serial fold over segments. The planner needs no sequence lengths, so it
never waits for the GPU: of packed sequences it assumes that one may be as long as the row.
"""

from dataclasses import dataclass

WHOLE = 1 << 30  # a segment length no sequence reaches
BLOCK = 64  # segments are whole blocks of this many tokens
TILE_US = 0.55  # one tile of the scan on one multiprocessor
SUMMARY_COST = 2.0  # a tile of the summary pass, which carries twice the state, in scan tiles
FOLD_US = 2.0  # folding one segment


@dataclass(frozen=True)
class Segments:
    """How the scan is cut. `length` tokens each (a multiple of 64), or WHOLE."""

    length: int
    num_slots: int
    """Upper bound of segments over all sequences; also the first size of carry buffers."""

    @property
    def split(self) -> bool:
        return self.length != WHOLE


def num_slots(tokens: int, num_seqs: int, unit: int, packed: bool) -> int:
    """Slots for units of `unit` tokens. tokens: of the packed row, or of each of num_seqs."""
    if packed:
        return tokens // unit + num_seqs
    return num_seqs * max(-(-tokens // unit), 1)


def plan_segments(tokens: int, num_seqs: int, heads: int, num_sms: int, packed: bool) -> Segments:
    """The cheapest cut by a small cost model, in microseconds.

    tokens: of the packed row, or of each of the num_seqs sequences.
    """
    whole = Segments(WHOLE, num_slots(tokens, num_seqs, WHOLE, packed))
    rows = tokens if packed else tokens * num_seqs
    chains = heads * num_seqs
    # serial: the longest chain, or the work of all chains over the multiprocessors
    best = max(tokens / 16, rows / 16 * heads / num_sms) * TILE_US
    chosen = whole
    if chains >= 2 * num_sms and not packed:
        return whole
    for waves in (1, 2, 3):
        per_head = max(waves * num_sms // heads, 1)
        length = -(-rows // per_head // BLOCK) * BLOCK
        if length <= 0 or length >= tokens:
            continue
        count = num_slots(tokens, num_seqs, length, packed)
        rounds = -(-count * heads // num_sms)
        cost = rounds * length / 16 * TILE_US * (1 + SUMMARY_COST) + -(-tokens // length) * FOLD_US
        if cost < best:
            best, chosen = cost, Segments(length, count)
    return chosen
