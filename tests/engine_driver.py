"""An engine over the scripted runner, with the small sizes of the tests: H = 16, P = 64."""

import random
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from openk3.engine import Engine, EngineConfig, Output, Request, SamplingParams
from openk3.engine.cache.checks import check
from openk3.engine.scripted import Script, ScriptedRunner, from_prefix
from openk3.engine.stores import KeyValueStore

H, P = 16, 64
VOCAB, END = 128, 127
NEVER = 100
"""Ids from here on are not emitted by the script."""


PAGE_BYTES = 8
"""Of an engine with an external store; host_bytes counts them."""


class Dictionary:
    """An external store in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def is_exist(self, key: str) -> bool:
        return key in self.values


class AtOnce(Executor):
    """Does what it is given before it says so: no thread decides the order of anything."""

    def submit(self, fn, /, *args, **kwargs):
        done: Future = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class Ticks:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


@dataclass
class Served:
    """What one request got."""

    request: Request
    ids: list[int] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """The numbers of the steps that brought something."""

    @property
    def reason(self) -> str | None:
        return self.outputs[-1].finish_reason if self.outputs else None

    @property
    def cached(self) -> int:
        return self.outputs[-1].cached_tokens


class Driver:
    """Adds requests, runs steps, checks every invariant and every emitted id."""

    def __init__(
        self,
        *,
        num_pages: int = 256,
        kda_groups: int = 2,
        page_tokens: int = P,
        max_positions: int = 1 << 20,
        script: Script | None = None,
        check_every: int = 1,
        external: KeyValueStore | None = None,
        **options,
    ) -> None:
        self.check_every = check_every
        self.runner = ScriptedRunner(
            script or from_prefix(NEVER),
            page_tokens=page_tokens,
            num_pages=num_pages,
            kda_groups=kda_groups,
            vocab_size=VOCAB,
            end_id=END,
            max_positions=max_positions,
            window=options["num_drafts"] + 1 if options.get("num_drafts") else 0,
            page_bytes=PAGE_BYTES if external else 1,
        )
        self.clock = Ticks()
        config = EngineConfig(**{"hash_block": H, "debug": True, **options})
        self.engine = Engine(self.runner, config, clock=self.clock, external=external)
        self.served: dict[str, Served] = {}
        self.steps = 0

    def add(self, prompt, max_tokens: int = 1, **options) -> Served:
        """Queue a request; `options` are of Request, or of its SamplingParams."""
        name = str(len(self.served))
        of_request = {
            key: options.pop(key) for key in ("salt", "media", "priority") if key in options
        }
        params = SamplingParams(max_tokens=max_tokens, **options)
        served = Served(Request(name, tuple(prompt), params, **of_request))
        self.engine.add(served.request)
        self.served[name] = served
        return served

    def step(self) -> list[Output]:
        self.steps += 1
        outputs = self.engine.step()
        for output in outputs:
            served = self.served[output.request_id]
            assert served.reason is None, f"{output} after the end"
            for token in output.new_ids:
                known = [*self._prompt(served.request), *served.ids]
                assert token == self.runner.script(served.request, known)
                served.ids.append(token)
            served.outputs.append(output)
            served.steps.append(self.steps)
        if self.steps % self.check_every == 0:
            check(self.engine.scheduler, self.engine.memory)
        return outputs

    def _prompt(self, request: Request) -> tuple[int, ...]:
        return self.runner.expand(request).ids if request.media else request.prompt_ids

    def drain(self) -> None:
        """Steps until nothing is left."""
        while self.engine.busy:
            self.step()

    def run(self, prompt, max_tokens: int = 1, **options) -> Served:
        """One request alone, to its end."""
        served = self.add(prompt, max_tokens, **options)
        self.drain()
        return served

    def assert_idle(self) -> None:
        """Every request has ended once, and holds nothing."""
        stats = self.engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_pages == stats.pages
        assert all(served.reason for served in self.served.values())
        assert len(self.engine.scheduler.slots) == self.engine.config.max_running


def random_ids(count: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(2, NEVER) for _ in range(count))


def serve_random(seed: int, total: int, **options) -> Driver:
    """Random requests over shared prefixes in a small engine, aborts and new weights at random."""
    rng = random.Random(seed)
    sizes = {"num_pages": 30, "page_tokens": 16, "hash_block": 4, "max_batch_tokens": 24}
    driver = Driver(**{**sizes, "max_running": 8, "script": from_prefix(17), **options})
    bases = [tuple(rng.randrange(17) for _ in range(60)) for _ in range(4)]
    while len(driver.served) < total or driver.engine.busy:
        while len(driver.served) < total and rng.random() < 0.4:
            own = tuple(rng.randrange(17) for _ in range(rng.randrange(20)))
            driver.add(
                rng.choice(bases)[: rng.randrange(1, 60)] + own,
                rng.randrange(1, 40),
                salt=rng.choice(["", "", "a"]),
            )
        if rng.random() < 0.1:
            driver.engine.abort(str(len(driver.served) - rng.randrange(10)))
        if rng.random() < 0.01:
            driver.runner.version = str(rng.random())
            driver.engine.new_weights(driver.runner.version)
        driver.step()
    driver.assert_idle()
    return driver
