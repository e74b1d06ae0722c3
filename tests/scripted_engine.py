"""An engine that says what a script says: the scheduler's and the model's part in API tests."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

from openk3.engine.types import Output, Request, Stats, TokenLogprobs
from openk3.errors import InputError, LimitError
from openk3.text.tokenizer import Tokenizer
from openk3.text.train_tokenizer import train

WORDS = "think response tools message call argument the weather in Paris is fine and so on " * 20


@cache
def tokenizer() -> Tokenizer:
    """A small vocabulary with every byte, the names of the channels and K3's special tokens."""
    return train([WORDS, '{"city": "Paris"} key="k" type="string" tool="t" index="1" ' * 20], 400)


def ids_of(marked: str) -> tuple[int, ...]:
    """Ids of text in which O, C, S, E in ⟨⟩ stand for the markers: "hm⟨C⟩think⟨S⟩"."""
    names = {"O": "<|open|>", "C": "<|close|>", "S": "<|sep|>", "E": "<|end_of_msg|>"}
    ids: list[int] = []
    for i, piece in enumerate(marked.replace("⟩", "⟨").split("⟨")):
        if i % 2:
            ids.append(tokenizer().special_id(names[piece]))
        else:
            ids += tokenizer().encode(piece)
    return tuple(ids)


class ScriptedEngine:
    """Emits `script(request)` one id a request and step, within its max_tokens.

    per_step: ids a request gets at a time.
    step_s: seconds that a step takes, as a model's pass would.
    gate: holds up every step until it is set.
    told: set once a request was aborted.
    """

    def __init__(
        self,
        script: Callable[[Request], Sequence[int]],
        *,
        max_context: int = 100_000,
        max_queued: int = 4096,
        per_step: int = 1,
        hash_block: int = 16,
        step_s: float = 0.0,
    ) -> None:
        self.script, self.max_context, self.per_step = script, max_context, per_step
        self.step_s = step_s
        self.max_queued, self.hash_block = max_queued, hash_block
        self.gate = threading.Event()
        self.gate.set()
        self.running: dict[str, tuple[Request, list[int]]] = {}
        self.seen: dict[str, Request] = {}
        self.prompts: set[tuple[object, ...]] = set()
        self.ended: Counter[str] = Counter()
        self.aborts: list[str] = []
        self.told = threading.Event()
        self.fail_at_step: int | None = None
        self.steps = self.num_prompt = self.num_cached = self.num_generated = 0

    def add(self, request: Request) -> None:
        size = len(request.prompt_ids)
        if size >= self.max_context:
            raise InputError(f"{size} tokens are more than the {self.max_context} that fit")
        if len(self.running) >= self.max_queued:
            raise LimitError(f"{self.max_queued} requests wait already")
        assert request.id not in self.seen, "ids are unique"
        ids = list(self.script(request))[: min(request.params.max_tokens, self.max_context - size)]
        self.seen[request.id] = request
        self.running[request.id] = (request, ids)

    def step(self) -> list[Output]:
        assert self.gate.wait(30), "a test forgot to open the gate"
        if self.step_s:
            time.sleep(self.step_s)
        self.steps += 1
        if self.steps == self.fail_at_step:
            raise RuntimeError("scripted failure")
        return [self._advance(request, left) for request, left in list(self.running.values())]

    def _advance(self, request: Request, left: list[int]) -> Output:
        new = tuple(left[: self.per_step])
        del left[: self.per_step]
        end_id = tokenizer().end_of_msg_id
        stops = {end_id, *request.params.stop_ids}
        reason = None
        if new and new[-1] in stops and not request.params.ignore_eos:
            reason = "stop"
        elif not left:
            reason = "length"
        cached = self._cached(request)
        if reason is not None:
            del self.running[request.id]
            self.ended[request.id] += 1
        self.num_generated += len(new)
        logprobs = None
        if request.params.logprobs is not None:
            top = tuple((i, -1.0 - i) for i in range(request.params.logprobs))
            logprobs = tuple(TokenLogprobs(-0.5, top) for _ in new)
        return Output(request.id, new, reason, logprobs, cached)

    def _cached(self, request: Request) -> int:
        """Whole hash blocks of the prompt that an earlier request had (checked once a request)."""
        if not hasattr(self, "_hits"):
            self._hits: dict[str, int] = {}
        if request.id not in self._hits:
            digests = request.media.digests if request.media else ()
            keys = [
                (request.salt, digests, request.prompt_ids[:end])
                for end in range(self.hash_block, len(request.prompt_ids), self.hash_block)
            ]
            hits = [key in self.prompts for key in keys]
            known = hits.index(False) if False in hits else len(hits)
            self.prompts.update(keys)
            self._hits[request.id] = known * self.hash_block
            self.num_prompt += len(request.prompt_ids)
            self.num_cached += known * self.hash_block
        return self._hits[request.id]

    def abort(self, request_id: str) -> None:
        self.aborts.append(request_id)
        self.told.set()
        if self.running.pop(request_id, None):
            self.ended[request_id] += 1

    def stats(self) -> Stats:
        free = 100 - len(self.running)
        return Stats(
            running=len(self.running),
            waiting=0,
            pages=100,
            free_pages=free,
            cached_pages=0,
            max_context=self.max_context,
            steps=self.steps,
            prompt_tokens=self.num_prompt,
            cached_tokens=self.num_cached,
            generated_tokens=self.num_generated,
            aborted=len(self.aborts),
            finished=sum(self.ended.values()),
            hash_block=self.hash_block,
        )
