"""The step behind the one under way, planned while nobody knows what that one will bring.

It is possible when every sequence that runs decodes, by one token a step, and nothing of its next
token but the id matters: no drafts, no grammar, no penalties. What a stop id will have ended costs
one row that nobody looks at. Requests that wait, and chunks of prompts, are for plans that know.
"""

from collections.abc import Sequence as Seq

from openk3.engine.plan import UNKNOWN, StepPlan
from openk3.engine.scheduler import Row, Scheduler
from openk3.engine.sequence import Sequence
from openk3.engine.types import Request

MAX_AHEAD = 16
"""Steps in a row that are planned so while requests wait for pages."""


def plan_ahead(scheduler: Scheduler, flying: Seq[Row]) -> tuple[list[Row], StepPlan] | None:
    """Rows and plan of the step behind `flying`; None if it has to wait for that one's results."""
    if scheduler.admission_may_help(MAX_AHEAD):
        return None
    if len(scheduler.running) > scheduler.config.max_batch_tokens:
        return None
    before = {row.seq: row for row in flying if row.is_current}
    goes_on = []
    for seq in scheduler.running:
        row = before.get(seq)
        known = seq.computed + (row.count if row else 0)
        if known != len(seq.ids) - (row is None) or not _is_plain(seq.request):
            return None
        if not (seq.aborted or (row and _ends(seq, scheduler.max_context))):
            goes_on.append((seq, known, UNKNOWN if row else seq.ids[-1]))
    rows, chunks = [], []
    for seq, start, token in goes_on:
        if scheduler.memory.grow(seq, start + 1):
            rows.append(Row(seq, 1))
            chunks.append(scheduler.chunk(seq, start, (token,)))
    if not rows:
        return None
    scheduler.steps_ahead += 1
    return rows, StepPlan(tuple(chunks), *scheduler.memory.take_copies())


def _is_plain(request: Request) -> bool:
    """Whether a next token can be chosen on a device that alone knows the last one."""
    return request.constraint is None and not request.params.penalises


def _ends(seq: Sequence, max_context: int) -> bool:
    """Whether the token under way is the last, whatever it is."""
    return min(seq.budget, max_context - len(seq.ids)) <= 1
