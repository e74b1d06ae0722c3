"""Which drafts of a chunk stand: a token is chosen at the position of each, as if there were none.

As long as a draft is what was chosen, the choice behind it counts too.
"""

from collections.abc import Sequence

from openk3.engine.plan import Chunk, ChunkResult
from openk3.engine.sampling import Choice, Row
from openk3.engine.types import TokenLogprobs


def sampling_rows(chunk: Chunk) -> list[Row]:
    """The positions of a chunk for which a token is chosen."""
    if not chunk.samples:
        return []
    known = chunk.start + chunk.num_known
    return [
        Row(
            chunk.request,
            known + i,
            (*chunk.output_ids, *chunk.drafts[:i]) if i else chunk.output_ids,
            constrained=i == 0,
        )
        for i in range(chunk.num_drafts + 1)
    ]


def standing(chunk: Chunk, chosen: Sequence[Choice]) -> Sequence[Choice]:
    """Of the choices at all `sampling_rows`, those that stand."""
    if chunk.request.constraint is not None:
        return chosen[:1]  # a grammar knows what it allows at the next position only
    right = 0
    while chosen and right < chunk.num_drafts and chosen[right].token_id == chunk.drafts[right]:
        right += 1
    return chosen[: right + 1]


def num_own(chunk: Chunk, num_standing: int) -> int:
    """How many tokens of a chunk are the sequence's own: the known ones, and right drafts."""
    return chunk.num_known + max(num_standing - 1, 0)


def result_of(
    chunk: Chunk, choices: Sequence[Choice], scores: tuple[TokenLogprobs, ...] = ()
) -> ChunkResult:
    """What choices that stand mean for a chunk; its grammar moves on."""
    bad = next((choice.error for choice in choices if choice.error), None)
    if bad is not None:
        return ChunkResult(error=bad)
    if choices and chunk.request.constraint is not None:
        chunk.request.constraint.accept(choices[0].token_id)
    logprobs = tuple(c.logprobs for c in choices if c.logprobs is not None)
    return ChunkResult(tuple(c.token_id for c in choices), logprobs or None, scores)
