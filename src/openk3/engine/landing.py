"""What a chunk's result means for its sequence: memory that landed, new tokens, an end."""

from openk3.engine.cache import Memory
from openk3.engine.plan import ChunkResult
from openk3.engine.scheduler import Row
from openk3.engine.sequence import Sequence
from openk3.engine.types import FinishReason, Output


def land(row: Row, result: ChunkResult, memory: Memory, max_context: int) -> Output | None:
    """Take one row's result in; None if there is nothing to report."""
    seq, new_ids = row.seq, result.new_ids
    if result.error is not None:
        memory.spoil(seq)
        name = seq.request.id
        return Output(name, (), "error", cached_tokens=seq.cached_tokens, error=result.error)
    computed = seq.computed + row.count
    assert bool(new_ids) == (computed == len(seq.ids)), f"{len(new_ids)} ids from {row}"
    reason = scores = None
    seq.scores += result.prompt_logprobs[max(0, len(seq.scores) - seq.computed) :]
    if new_ids and not seq.output and seq.request.params.prompt_logprobs is not None:
        scores = tuple(seq.scores)
    if new_ids:
        computed += len(new_ids) - 1
        new_ids, reason = cut(seq, new_ids, max_context)
        seq.ids.extend(new_ids)
        seq.output.extend(new_ids)
        computed = min(computed, len(seq.ids))
    memory.land_pass(seq, computed)
    if not new_ids or seq.aborted:
        return None
    logprobs = result.logprobs[: len(new_ids)] if result.logprobs else None
    return Output(
        seq.request.id, new_ids, reason, logprobs, seq.cached_tokens, prompt_logprobs=scores
    )


def cut(
    seq: Sequence, new_ids: tuple[int, ...], max_context: int
) -> tuple[tuple[int, ...], FinishReason | None]:
    """The new ids up to the first that ends the request, and how it ends it."""
    room = min(seq.budget, max_context - len(seq.ids))
    for count, token in enumerate(new_ids, 1):
        if token in seq.stop_ids:
            return new_ids[:count], "stop"
        if count == room:
            return new_ids[:count], "length"
    return new_ids, None
