"""Planner: whether to cut long sequences into segments that run side by side on one GPU.

A scan is serial over 16-token tiles, and one head of one sequence keeps one multiprocessor busy.
With few heads and long sequences most of the GPU would idle; cutting costs a second pass (with a
state twice as wide) and a serial fold over segments. The planner needs no sequence lengths, so it
never waits for the GPU: of packed sequences it assumes that one may be as long as the row.
"""

from dataclasses import dataclass

WHOLE = 1 << 30  # a segment length no sequence reaches
BLOCK = 64  # segments are whole blocks of this many tokens

# microseconds, measured on an H200 (benchmarks/results/kda.md)
SCAN_US = 0.75  # one tile of a whole scan, while every head has a multiprocessor of its own
CUT_US = 0.47  # one tile of both passes of a cut scan, times the programs on a multiprocessor
CUT_LEAST_US = 0.95  # ... and however few they are
PROGRAMS = 4  # of the first pass, for a segment of a head
FOLD_US = 4.3  # folding one segment
CUT_LAUNCH_US = 15.0  # two more kernels
CLEARLY = 0.98  # more segments must pay; the costs are no better known than this


@dataclass(frozen=True)
class Segments:
    """How the scan is cut. `length` tokens each (a multiple of 64), or WHOLE."""

    length: int
    num_slots: int
    """Upper bound of the segments of all sequences: the first size of carry buffers."""

    @property
    def split(self) -> bool:
        return self.length != WHOLE


def num_slots(tokens: int, num_seqs: int, unit: int, packed: bool) -> int:
    """Slots for units of `unit` tokens. tokens: of the packed row, or of each of num_seqs."""
    if packed:
        return tokens // unit + num_seqs
    return num_seqs * max(-(-tokens // unit), 1)


def plan_segments(tokens: int, num_seqs: int, heads: int, num_sms: int, packed: bool) -> Segments:
    """The cheapest cut by the cost model above.

    tokens: of the packed row, or of each of the num_seqs sequences.
    """
    rows = tokens if packed else tokens * num_seqs
    chosen = Segments(WHOLE, num_slots(tokens, num_seqs, WHOLE, packed))
    busy = max(1.0, rows * heads / max(tokens, 1) / num_sms)
    best = tokens / 16 * SCAN_US * busy
    for per_sm in (0.5, 0.75, 1.0, 1.5):
        per_head = max(int(per_sm * num_sms / heads), 1)
        length = -(-rows // (per_head * BLOCK)) * BLOCK
        if not 0 < length < tokens:
            continue
        count = num_slots(tokens, num_seqs, length, packed)
        tile = max(CUT_LEAST_US, CUT_US * -(-PROGRAMS * count * heads // num_sms))
        cost = length / 16 * tile + -(-tokens // length) * FOLD_US + CUT_LAUNCH_US
        if cost < CLEARLY * best:
            best, chosen = cost, Segments(length, count)
    return chosen
