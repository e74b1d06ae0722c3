"""What an engine has done since it was made, and what it holds now."""

from collections import Counter
from collections.abc import Sequence as Seq

from openk3.engine.cache import Memory
from openk3.engine.plan import ChunkResult, StepPlan
from openk3.engine.scheduler import Scheduler
from openk3.engine.types import Output, Stats


class Counts:
    """Counters of one engine; `stats` adds the gauges."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        """By the names of Stats."""

    def admit(self, scheduler: Scheduler) -> None:
        """Count those that the plan being made has admitted for the first time."""
        for seq in scheduler.admitted:
            if seq.admissions == 1:
                self._counts["prompt_tokens"] += seq.num_prompt
                self._counts["cached_tokens"] += seq.cached_tokens
        scheduler.admitted.clear()

    def step(self, plan: StepPlan, results: Seq[ChunkResult], outputs: Seq[Output]) -> None:
        """Count a step that has landed; results are the plan's chunks'."""
        counts = self._counts
        counts["steps"] += 1
        counts["computed_tokens"] += sum(len(chunk.token_ids) for chunk in plan.chunks)
        counts["drafts"] += sum(chunk.num_drafts > 0 for chunk in plan.chunks)
        counts["drafted_tokens"] += sum(chunk.num_drafts for chunk in plan.chunks)
        counts["accepted_tokens"] += sum(len(r.new_ids) - 1 for r in results if r.new_ids)
        counts["generated_tokens"] += sum(len(output.new_ids) for output in outputs)
        counts["finished"] += sum(output.finish_reason is not None for output in outputs)

    def abort(self) -> None:
        """Count a request that was ended early."""
        self._counts["aborted"] += 1

    def stats(self, scheduler: Scheduler, memory: Memory, max_context: int, now: float) -> Stats:
        """Counters, and gauges of now."""
        pool, host, external = memory.pool, memory.host, memory.external
        came = [seq.arrived for seq in scheduler.waiting]
        return Stats(
            running=len(scheduler.running),
            waiting=len(came),
            pages=pool.num_pages,
            free_pages=pool.free,
            cached_pages=pool.idle_pages,
            max_context=max_context,
            preemptions=scheduler.preemptions,
            host_pages=host.num_pages - len(host.blank),
            host_hits=memory.host_hits,
            external_puts=external.puts if external else 0,
            external_hits=external.fetched if external else 0,
            hash_block=memory.block,
            wait_seconds=now - min(came) if came else 0.0,
            **self._counts,
        )
