"""Which sequences advance in a step, by how much, and in which memory.

Continuous batching: every step is made anew of the sequences that run. Decoding rows come first,
prefill chunks fill what is left of the token budget, so a long prompt never holds up an answer.
Of that rest the first prefill in rank (priority, then arrival) is sure of half, which keeps long
prompts moving; the other half goes to the prefills with the least left to do, which lets a short
prompt pass a long one. A waiting request is admitted when that rule would give it a token at once
and its pages fit beside those that running ones are known, and some that they are expected, to
need. The expected share rises when a preemption shows that it was too small, and decays.

A sequence that lacks a page takes it from those after it in rank: they are dropped, wait again,
and start over from their best checkpoint. Nobody is dropped for one that comes after it, and one
alone always fits, so the first in rank always advances: there is no step without progress.
"""

from bisect import insort
from dataclasses import dataclass

from openk3.engine.budget import gets_some, share
from openk3.engine.cache import Hit, Memory
from openk3.engine.drafts import propose
from openk3.engine.plan import Chunk, Runner, StepPlan
from openk3.engine.sequence import Sequence
from openk3.engine.types import EngineConfig

SCAN = 64
"""Waiting requests looked at in a step."""
MAX_BLOCKED = 8
"""Of those, how many may prove not to fit before the rest is left for the next step."""
MAX_PASSED = 64
"""Admissions that may pass a request for which there are no pages."""
FIRST_EXPECTED, MORE_EXPECTED, DECAY = 0.1, 0.25, 0.999
"""Fraction of the tokens that running requests may still generate for which pages are set aside
when another is admitted: at first, more after each preemption, and a step later."""


@dataclass
class Row:
    """What one sequence does in the step being made."""

    seq: Sequence
    count: int
    """Known tokens that it computes."""
    drafts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.admission = self.seq.admissions

    @property
    def is_current(self) -> bool:
        """Whether its sequence still runs in the memory that the row was planned for."""
        return self.seq.slot >= 0 and self.seq.admissions == self.admission


class Scheduler:
    """Queues and plans. The engine runs each plan and lands its results."""

    def __init__(
        self, runner: Runner, config: EngineConfig, memory: Memory, max_context: int
    ) -> None:
        self.runner = runner
        self.config = config
        self.memory = memory
        self.max_context = max_context
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.slots = list(range(config.max_running - 1, -1, -1))
        self.rows: dict[Sequence, Row] = {}
        self.expected = FIRST_EXPECTED
        self.turn = 0
        self.preemptions = 0
        self.admitted: list[Sequence] = []
        """By the plan being made."""
        self.stuck = False
        """Those that wait were looked at, and lack pages; nothing has changed since."""
        self.steps_ahead = 0
        """Since the last plan that admits: see `openk3.engine.ahead`."""

    def enqueue(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=lambda other: other.rank)
        self.stuck = False

    def admission_may_help(self, max_steps: int) -> bool:
        """Whether a plan that admits would perhaps admit somebody."""
        if not (self.waiting and self.slots):
            return False
        return not self.stuck or self.steps_ahead >= max_steps

    # A plan

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to do."""
        self.rows.clear()
        if not (self.running or self.waiting):
            return None
        self.turn += 1
        self.steps_ahead = 0
        self.expected = max(FIRST_EXPECTED, self.expected * DECAY)
        prefills = [seq for seq in self.running if seq.remaining > 1]
        left = self.config.max_batch_tokens
        left -= self._decode(left, bool(prefills or self.waiting))
        prefills = [seq for seq in prefills if seq.slot >= 0]
        if left > 0:
            if self.waiting and self.slots:
                self.stuck = not prefills
                self._admit(prefills, left)
            self._prefill(prefills, left)
        if not (self.rows or self.running) and all(seq.fetch for seq in self.waiting):
            return None
        assert self.rows, f"{len(self.running)} running, {len(self.waiting)} waiting, none advances"
        chunks = tuple(self._chunk_of(row) for row in self.rows.values())
        return StepPlan(chunks, *self.memory.take_copies())

    def _decode(self, budget: int, prefill_waits: bool) -> int:
        """Rows with one known token left; returns the tokens they take."""
        rows = [seq for seq in self.running if seq.remaining == 1]
        if not rows:
            return 0
        room = max(1, budget - budget // 4) if prefill_waits else budget
        if len(rows) > room:
            rest = rows[1:]
            skip = self.turn * (room - 1) % len(rest)
            rows = [rows[0], *(rest + rest)[skip : skip + room - 1]]
        num_drafts = min(self.config.num_drafts, room // len(rows) - 1)
        for seq in rows:
            if seq.slot < 0:
                continue
            guesses: tuple[int, ...] = ()
            if num_drafts > 0 and seq.output:
                guesses = propose(seq, self.config, self._window(seq, num_drafts))
            if guesses and not self.memory.grow(seq, seq.computed + 1 + len(guesses)):
                guesses = ()
            if self._make_room(seq, seq.computed + 1):
                self.rows[seq] = Row(seq, 1, guesses)
        return sum(1 + len(row.drafts) for row in self.rows.values())

    def _window(self, seq: Sequence, most: int) -> int:
        """Drafts that may follow the next token, at most `most`.

        A window ends before the next block end: the pass that reaches that is then one without
        drafts, and can leave the state there."""
        block_end = (seq.computed // self.memory.block + 1) * self.memory.block
        return min(
            most,
            block_end - seq.computed - 2,
            seq.budget - 1,
            self.max_context - len(seq.ids) - 1,
        )

    def _prefill(self, prefills: list[Sequence], budget: int) -> None:
        """Deal the rest of the budget out among the prefills."""
        for seq, count in share(prefills, budget):
            if seq.slot < 0:
                continue
            count = min(count, self._room(seq))
            if count > 0 and self._make_room(seq, seq.computed + count):
                self.rows[seq] = Row(seq, count)

    def _room(self, seq: Sequence) -> int:
        """Tokens it can compute with its own pages, free ones, and those of all after it."""
        memory = self.memory
        pages = memory.pool.free + len(seq.latents)
        for other in reversed(self.running):
            if other.rank <= seq.rank:
                break
            pages += len(other.latents) + len(other.live)
        return pages * memory.page - seq.computed

    def _make_room(self, seq: Sequence, end: int) -> bool:
        """Grow to `end`, at the cost of those after it in rank."""
        while not self.memory.grow(seq, end):
            last = self.running[-1]
            if last.rank <= seq.rank:
                return False
            self.preempt(last)
        return True

    def preempt(self, seq: Sequence) -> None:
        """Requeue a sequence for want of pages, and admit fewer for a while."""
        assert seq not in self.admitted, f"{seq.request.id} is preempted in the step it came in"
        self.requeue(seq)
        self.preemptions += 1
        self.expected = min(1.0, self.expected + MORE_EXPECTED)

    def requeue(self, seq: Sequence) -> None:
        """A running sequence gives its memory back, and waits to compute it again."""
        self.rows.pop(seq, None)
        self.drop(seq)
        seq.estimate = len(seq.ids)
        self.enqueue(seq)

    def drop(self, seq: Sequence) -> None:
        """A running sequence gives its slot and memory back."""
        self.running.remove(seq)
        self.stuck = False
        self.runner.forget(seq.slot)
        self.slots.append(seq.slot)
        self.memory.close(seq)

    def _chunk_of(self, row: Row) -> Chunk:
        start = row.seq.computed
        known = row.seq.ids[start : start + row.count]
        return self.chunk(row.seq, start, (*known, *row.drafts), len(row.drafts))

    def chunk(
        self, seq: Sequence, start: int, token_ids: tuple[int, ...], num_drafts: int = 0
    ) -> Chunk:
        """The chunk of a running sequence that has grown to hold it."""
        end = start + len(token_ids) - num_drafts
        return Chunk(
            request=seq.request,
            slot=seq.slot,
            token_ids=token_ids,
            start=start,
            latent_pages=seq.latent_pages[: self.memory.pages_for(end + num_drafts)],
            state_pages=seq.live,
            checkpoints=self.memory.checkpoints(seq, start, end),
            num_drafts=num_drafts,
            output_ids=seq.output,
            samples=end >= len(seq.ids),
        )

    # Admission

    def _admit(self, prefills: list[Sequence], budget: int) -> None:
        """Move waiting requests to the running ones while tokens, slots and pages allow.

        One whose prompt has a prefix that a running prefill before it is about to leave a
        checkpoint of (the same prompt, the same system message) waits for that instead."""
        blocked: list[Sequence] = []
        aside = self._set_aside()
        coming = {key: seq.rank for seq in prefills for key in seq.mark_keys(seq.computed)}
        for seq in self.waiting[:SCAN]:
            if not self.slots:
                break
            if seq.fetch is not None or not gets_some(seq, prefills, budget):
                continue
            hit = self.memory.lookup(seq)
            start = hit.blocks * self.memory.block
            seq.estimate = len(seq.ids) - start
            if any(coming.get(key, seq.rank) < seq.rank for key in seq.mark_keys(start)):
                continue
            if not gets_some(seq, prefills, budget):
                continue
            if not self._open(seq, hit, aside):
                blocked.append(seq)
                if seq.passed >= MAX_PASSED or len(blocked) == MAX_BLOCKED:
                    break
                continue
            self.waiting.remove(seq)
            self._start(seq)
            aside = self._set_aside()
            prefills.append(seq)
            coming.update((key, seq.rank) for key in seq.mark_keys(start))
            for other in blocked:
                other.passed += 1

    def _open(self, seq: Sequence, hit: Hit, aside: float) -> bool:
        """Give it memory if that fits; when nothing else runs it has to fit, if need be cold."""
        memory, cost = self.memory, self.memory.cost(seq, hit)
        if not self.running:
            return memory.open(seq, hit if cost <= memory.pool.free else Hit())
        cost += self.expected * seq.budget / memory.page
        return cost <= memory.pool.free - aside and memory.open(seq, hit)

    def _set_aside(self) -> float:
        """Free pages that are not for others: those that running ones need, and may need."""
        known = new = 0
        for seq in self.running:
            known += self.memory.pages_for(len(seq.ids)) - len(seq.latents)
            new += seq.budget
        return known + self.expected * new / self.memory.page

    def _start(self, seq: Sequence) -> None:
        seq.slot = self.slots.pop()
        if not seq.admissions:
            seq.cached_tokens = seq.computed
        seq.admissions += 1
        seq.passed = 0
        insort(self.running, seq, key=lambda other: other.rank)
        self.admitted.append(seq)
        self.stuck = False
