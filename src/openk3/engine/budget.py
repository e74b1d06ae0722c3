"""How a step's prefill budget is dealt out: half by rank, half to the least left to do."""

from collections.abc import Sequence as Seq

from openk3.engine.sequence import Sequence


def share(prefills: Seq[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """(sequence, tokens) of a step's prefills; the first in rank is sure of half of the budget."""
    if not prefills or budget <= 0:
        return []
    first = min(prefills, key=lambda seq: seq.rank)
    sure = min(first.remaining, (budget + 1) // 2)
    left = budget - sure
    dealt: list[tuple[Sequence, int]] = []
    for seq in sorted(prefills, key=lambda seq: (seq.remaining, seq.rank)):
        if seq is not first and left > 0:
            dealt.append((seq, min(seq.remaining, left)))
            left -= dealt[-1][1]
    return [(first, min(first.remaining, sure + left)), *dealt]


def gets_some(seq: Sequence, prefills: Seq[Sequence], budget: int) -> bool:
    """Whether a waiting sequence would get a token of this step's budget beside these."""
    if not prefills:
        return True
    first = min(prefills, key=lambda other: other.rank)
    if seq.rank < first.rank:
        return True
    left = budget - min(first.remaining, (budget + 1) // 2)
    smaller = sum(
        other.remaining
        for other in prefills
        if other is not first and other.remaining <= seq.estimate
    )
    return smaller < left
