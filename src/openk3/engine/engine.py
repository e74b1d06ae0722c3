"""The engine: requests in, one step at a time, new tokens out.

`step` is the whole walk: the scheduler makes a plan, the runner computes it, `_commit` lands it.
`add` and `abort` may be called from another thread, also while a step computes.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any, cast

from openk3._io import Clock, SystemClock
from openk3.engine import fetching, intake
from openk3.engine.ahead import plan_ahead
from openk3.engine.cache import Memory
from openk3.engine.cache.checks import check
from openk3.engine.counts import Counts
from openk3.engine.landing import land
from openk3.engine.plan import ChunkResult, Results, Runner, StepPlan, num_host_pages
from openk3.engine.scheduler import Row, Scheduler
from openk3.engine.sequence import Sequence
from openk3.engine.stores import KeyValueStore
from openk3.engine.types import EngineConfig, Output, Request, Stats
from openk3.engine.warm_up import run_prompts
from openk3.errors import ConfigError, ConflictError, LimitError


@dataclass
class Flight:
    """A step that was launched."""

    rows: list[Row]
    plan: StepPlan
    results: Results


class Engine:
    """Continuous batching over a runner, or over a model through the runner for models.

    `model` is an `openk3.model.K3` or anything that follows `openk3.engine.plan.Runner`."""

    def __init__(
        self,
        model: Any,
        config: EngineConfig | None = None,
        *,
        clock: Clock | None = None,
        external: KeyValueStore | None = None,
    ) -> None:
        """external: a store instead of the one that the config names."""
        self.config = config or EngineConfig()
        self.runner = _runner_for(model, self.config)
        self.clock = clock or SystemClock()
        shape = self.runner.geometry
        self.max_context = _max_context(self.runner, self.config)
        self.memory = Memory(
            shape,
            self.config.hash_block,
            enabled=self.config.prefix_cache,
            num_host_pages=num_host_pages(shape, self.config),
            poison=self.config.debug,
        )
        self.memory.external = fetching.connect(external, self.config, self.runner)
        self.scheduler = Scheduler(self.runner, self.config, self.memory, self.max_context)
        self._known: dict[str, Sequence] = {}
        self._done: list[Output] = []
        """Ends that no step has reported yet."""
        self._aborting: list[Sequence] = []
        """To be ended when the step under way has been computed."""
        self._lock = RLock()
        self._computing = False
        self._flight: Flight | None = None
        """Launched, and not landed: only between and in steps that overlap."""
        self._overlap = self.config.overlaps(self.runner.runs_beside_host)
        self._arrivals = 0
        self._counts = Counts()

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request. InputError if it can never run, LimitError if the queue is full,
        ConflictError if one of the same id has not ended."""
        prompt = intake.prompt_of(request, self.runner, self.max_context)
        chain = self.memory.chain(request, prompt)
        with self._lock:
            if request.id in self._known:
                raise ConflictError(f"request {request.id!r} is running; ids must differ")
            if len(self.scheduler.waiting) >= self.config.max_queued:
                raise LimitError(
                    f"{self.config.max_queued} requests are waiting (max_queued); try again later"
                )
            if chain.root != self.memory.root(request):  # new weights came while it was hashed
                chain = self.memory.chain(request, prompt)
            self._arrivals += 1
            seq = Sequence(
                request, prompt, chain, self._arrivals, self.clock.now(), self.runner.end_id
            )
            self._known[request.id] = seq
            self.scheduler.enqueue(seq)
            fetching.start(seq, self.memory)

    def _land_fetched(self, wait_s: float = 0.0) -> None:
        if fetching.land(self.scheduler.waiting, self.memory, self.runner, wait_s):
            self.scheduler.stuck = False

    def abort(self, request_id: str) -> None:
        """End a request at once, or when the step under way has been computed. Its Output comes
        with the next step. No-op for an id that is not known or has ended."""
        with self._lock:
            seq = self._known.get(request_id)
            if seq is None or seq.aborted:
                return
            seq.aborted = True
            if self._computing:
                self._aborting.append(seq)
            else:
                self._end_early(seq)

    @property
    def busy(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._done)

    # A step

    def step(self) -> list[Output]:
        """Compute one batch. What it brought, for each request that it concerned.

        With overlap, the batch behind it is launched before this one's results are waited for."""
        with self._lock:
            assert not self._computing, "step is called while another step computes"
            self._land_fetched()
            plan = None if self._flight else self.scheduler.plan()
            if plan is None and self._flight is None:
                if not self._done:
                    self._land_fetched(fetching.WAIT_S)  # there is nothing else to do
                return self._take_done()
            rows = list(self.scheduler.rows.values())
            self._computing = True
            self._counts.admit(self.scheduler)
        flight, results = self._run(rows, plan)
        with self._lock:
            self._computing = False
            outputs = self._commit(flight, results)
            if self.config.debug:
                check(self.scheduler, self.memory)
            return [*self._take_done(), *outputs]

    def _run(self, rows: list[Row], plan: StepPlan | None) -> tuple[Flight, Seq[ChunkResult]]:
        """The step under way, or a new one by `plan`, and its results."""
        with self._recovering():
            flight = self._flight if plan is None else self._launch(rows, plan)
            assert flight is not None, "neither a step under way nor a plan"
            self._flight = self._launch_ahead(flight) if self._overlap else None
            return flight, flight.results()

    def _launch(self, rows: list[Row], plan: StepPlan) -> Flight:
        if self._overlap:
            return Flight(rows, plan, self.runner.launch(plan))
        results = self.runner.run(plan)
        return Flight(rows, plan, lambda: results)

    def _launch_ahead(self, flight: Flight) -> Flight | None:
        """The step behind `flight`, if it can be planned without that one's results."""
        with self._lock:
            found = plan_ahead(self.scheduler, flight.rows)
        return self._launch(*found) if found else None

    def _settle(self) -> None:
        """Wait for the step under way; its outputs are for the next step to report."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        with self._recovering():
            results = flight.results()
        self._done += self._commit(flight, results)

    def _take_done(self) -> list[Output]:
        done, self._done = self._done, []
        return done

    def _commit(self, flight: Flight, results: Seq[ChunkResult]) -> list[Output]:
        """Land memory, then tokens; end what has ended."""
        rows = flight.rows
        assert len(results) == len(rows), f"{len(results)} results for {len(rows)} chunks"
        self.memory.land_copies()
        outputs: list[Output] = []
        for row, result in zip(rows, results, strict=True):
            if not row.is_current:  # it ended by the token before, which was not known then
                continue
            output = land(row, result, self.memory, self.max_context)
            if output is None:
                continue
            outputs.append(output)
            if output.finish_reason:
                self._remove(row.seq)
        self._end_aborted()
        if self._flight and not any(row.is_current for row in self._flight.rows):
            self._flight = None
        self._counts.step(flight.plan, results, outputs)
        return outputs

    def _end_aborted(self) -> None:
        for seq in self._aborting:
            if self._known.get(seq.request.id) is seq:
                self._end_early(seq)
        self._aborting.clear()

    def _end_early(self, seq: Sequence) -> None:
        """End an aborted request; the next step reports it."""
        self._remove(seq)
        self._counts.abort()
        self._done.append(Output(seq.request.id, (), "abort", cached_tokens=seq.cached_tokens))

    def _remove(self, seq: Sequence) -> None:
        del self._known[seq.request.id]
        if seq.slot >= 0:
            self.scheduler.drop(seq)
        else:
            self.scheduler.waiting.remove(seq)

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        """If the step inside breaks off, requests keep their tokens, and start over in clean
        memory."""
        whole = False
        try:
            yield
            whole = True
        finally:
            if not whole:
                with self._lock:
                    self._computing = False
                    self._flight = None
                    for seq in list(self.scheduler.running):
                        self.scheduler.requeue(seq)
                    self.memory.reset_after_failure()
                    self._end_aborted()

    # The whole

    def stats(self) -> Stats:
        """Counters and gauges of now."""
        with self._lock:
            now = self.clock.now()
            return self._counts.stats(self.scheduler, self.memory, self.max_context, now)

    def warm_up(self) -> None:
        """What would make first steps slow, in advance: on a GPU decoding steps are recorded, and
        kernels compiled for prompts of several lengths. ConflictError if a request is running."""
        if self._known:
            raise ConflictError("warm_up is called while requests run; call it before the first")
        if self.runner.warm_up():
            run_prompts(self)
            self.reset()
            self._counts = Counts()

    def reset(self) -> None:
        """Forget every reusable prefix, in the pool and in host memory. Running requests go on."""
        with self._lock:
            self._between_steps("reset")
            self.memory.clear()
            if self.memory.external:
                self.memory.external.generation += 1

    def drop_host(self) -> None:
        """Forget the host tier and give its memory back."""
        with self._lock:
            self._between_steps("drop_host")
            self.memory.host.clear()
            self.runner.drop_host()

    def new_weights(self, version: str) -> None:
        """The runner computes with other weights from now on: no memory of the old ones is used.

        Running requests keep their tokens, and compute their memory anew."""
        with self._lock:
            self._between_steps("new_weights")
            for seq in reversed(list(self.scheduler.running)):
                self.scheduler.requeue(seq)
            self.memory.new_weights(version)
            if self.memory.external:
                self.memory.external.name = self.runner.fingerprint()
            for seq in self.scheduler.waiting:
                seq.chain = self.memory.rekey(seq)

    def _between_steps(self, name: str) -> None:
        if self._computing:
            raise ConflictError(f"{name} is called while a step computes; call it between steps")
        self._settle()


def _max_context(runner: Runner, config: EngineConfig) -> int:
    """The longest sequence that the pages hold. Raises ConfigError where they hold none."""
    shape = runner.geometry
    if shape.page_tokens % config.hash_block:
        raise ConfigError(
            f"page_tokens ({shape.page_tokens}) must be a multiple of hash_block "
            f"({config.hash_block})"
        )
    room = (shape.num_pages - shape.kda_groups) * shape.page_tokens
    if min(runner.max_positions, room) < 2:
        raise ConfigError(
            f"{shape.num_pages} pages hold no sequence: its state alone takes "
            f"{shape.kda_groups}; raise num_pages or memory_bytes"
        )
    return min(runner.max_positions, room)


def _runner_for(model: Any, config: EngineConfig) -> Runner:
    if hasattr(model, "run") and hasattr(model, "geometry"):
        return cast(Runner, model)
    from openk3.engine.invariant import InvariantRunner
    from openk3.engine.runner import ModelRunner

    return (InvariantRunner if config.batch_invariant else ModelRunner)(model, config)
