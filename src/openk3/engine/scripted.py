"""A runner without a model: it emits ids that a function gives, and checks every page it reads.

Its memory holds, instead of latents and states, digests of the prefix that they stand for. A chunk
whose pages hold anything but the memory of exactly its own prefix raises `WrongMemoryError`: wrong
page, stale state, state of another position or group, page written by two, poison. It is the oracle
of the engine's tests, and a backend for tests of everything above the engine.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from openk3.engine.plan import (
    UNKNOWN,
    Chunk,
    ChunkResult,
    Geometry,
    Prompt,
    Results,
    StepPlan,
    Tier,
)
from openk3.engine.types import Request, TokenLogprobs

Script = Callable[[Request, Sequence[int]], int]
"""(request, prompt and output so far) -> next id."""
Page = list[object]
"""Digests by offset (latents), or [(group, position, digest)] (a state)."""


class WrongMemoryError(AssertionError):
    """A chunk was given memory that is not its own prefix's."""


def from_ids(outputs: Mapping[str, Sequence[int]], end_id: int) -> Script:
    """Give each request the output of its id, then `end_id`."""

    def next_id(request: Request, ids: Sequence[int]) -> int:
        output = outputs[request.id]
        at = len(ids) - len(request.prompt_ids)
        return output[at] if at < len(output) else end_id

    return next_id


def from_prefix(vocab_size: int, memory: int = 3) -> Script:
    """An id that is a fixed function of the last `memory` ids: repeats itself now and then."""
    return lambda request, ids: hash(tuple(ids[-memory:])) % vocab_size


class ScriptedRunner:
    """Follows `openk3.engine.plan.Runner`. `errors` are ids of requests that fail; `version` and
    the salt of a request stand for the weights, so that their memories differ. With a `window` of
    so many tokens, the state of a row that decodes lags behind by its last window, as it does in a
    runner that replays what was accepted, until a pass without drafts is to keep it."""

    def __init__(
        self,
        script: Script,
        *,
        page_tokens: int = 64,
        num_pages: int = 64,
        kda_groups: int = 2,
        vocab_size: int = 256,
        end_id: int = 0,
        max_positions: int = 1 << 20,
        page_bytes: int = 1,
        window: int = 0,
    ) -> None:
        self.geometry = Geometry(page_tokens, page_bytes, num_pages, kda_groups, layers_per_group=1)
        self.script = script
        self.vocab_size = vocab_size
        self.end_id = end_id
        self.max_positions = max_positions
        self.version = ""
        self.errors: set[str] = set()
        self.plans: list[StepPlan] = []
        self.picture_size = 4
        """Positions that one picture takes."""
        self.media_id = 1
        self.runs_beside_host = False
        self.memory: dict[Tier, dict[int, Page]] = {"pool": {}, "host": {}}
        self.window = window
        self._accepted: dict[int, int] = {}
        """Of a slot's last window, tokens that its state does not hold yet."""
        self._prefixes: dict[int, tuple[str, list[int]]] = {}
        self._written: list[tuple[tuple[object, ...], ...]] = []
        self._failed: dict[int, str] = {}
        self._chosen: dict[int, tuple[str, list[int]]] = {}
        """What a slot's request has been given so far, also what the engine has not seen yet."""

    def warm_up(self) -> bool:
        """There is nothing to warm."""
        return False

    def run(self, plan: StepPlan) -> list[ChunkResult]:
        """Poison, copies, chunks; every read is checked."""
        self.plans.append(plan)
        pool = self.memory["pool"]
        sources = {copy.source for copy in plan.copies if copy.source_tier == "pool"}
        if sources & set(plan.poison):
            raise WrongMemoryError(f"poison before copies: {sorted(sources & set(plan.poison))}")
        for page in plan.poison:
            pool[page] = ["poison"] * self.geometry.page_tokens
        for copy in plan.copies:
            source = self.memory[copy.source_tier].get(copy.source, [])
            self.memory[copy.target_tier][copy.target] = list(source)
        _check_owners(plan, self.geometry)
        return [self._chunk(chunk) for chunk in plan.chunks]

    def launch(self, plan: StepPlan) -> Results:
        """Runs at once."""
        results = self.run(plan)
        return lambda: results

    def forget(self, slot: int) -> None:
        self._prefixes.pop(slot, None)
        self._failed.pop(slot, None)
        self._accepted.pop(slot, None)

    def drop_host(self) -> None:
        self.memory["host"].clear()

    def read_host(self, pages: Sequence[int]) -> bytes:
        """As long as pages are, whatever they stand for: digests are kept aside."""
        if not pages:
            return b""
        held = tuple(tuple(self.memory["host"].get(page, [])) for page in pages)
        self._written.append(held)
        return len(self._written).to_bytes(len(pages) * self.geometry.id_bytes, "big")

    def write_host(self, pages: Sequence[int], data: bytes) -> None:
        held = self._written[int.from_bytes(data, "big") - 1] if pages else ()
        for page, cells in zip(pages, held, strict=True):
            self.memory["host"][page] = list(cells)

    def fingerprint(self) -> str:
        return "scripted"

    def expand(self, request: Request) -> Prompt:
        """Each `media_id` becomes `picture_size` of them."""
        ids: list[int] = []
        spans = []
        for token in request.prompt_ids:
            if token == self.media_id:
                spans.append((len(ids), self.picture_size))
            ids += [token] * (self.picture_size if token == self.media_id else 1)
        return Prompt(tuple(ids), tuple(spans))

    def _chunk(self, chunk: Chunk) -> ChunkResult:
        request = chunk.request
        if self._failed.get(chunk.slot) == request.id:  # launched before the engine saw that
            return ChunkResult(error="its state is not finite")
        prompt = self.expand(request) if request.media else Prompt(request.prompt_ids)
        if chunk.num_drafts and chunk.token_ids[-1] == UNKNOWN:
            chunk = self._drafted(chunk)
        if UNKNOWN in chunk.token_ids:
            owner, given = self._chosen[chunk.slot]
            _expect(owner == request.id, chunk, f"goes on behind a token of {owner}")
            chunk = replace(chunk, token_ids=tuple(given[-1:]), output_ids=tuple(given))
        known = [*prompt.ids, *chunk.output_ids]
        _check_tokens(chunk, known)
        prefix = self._prefix(chunk, known, prompt)
        self._read(chunk, prefix)
        self._write(chunk, prefix)
        if request.id in self.errors:
            self._failed[chunk.slot] = request.id
            return ChunkResult(error="its logits are not finite")
        new_ids = self._choose(chunk, known) if chunk.samples else ()
        self._chosen[chunk.slot] = request.id, [*chunk.output_ids, *new_ids]
        self._write_states(chunk, prefix, new_ids)
        scores = tuple(TokenLogprobs(-0.01 * i) for i in chunk.scored())
        return ChunkResult(new_ids, self._logprobs(request, new_ids), scores)

    def _write_states(self, chunk: Chunk, prefix: list[int], new_ids: tuple[int, ...]) -> None:
        """The live state, and the checkpoints that are asked for."""
        end = chunk.start + chunk.num_known
        held = end + max(0, len(new_ids) - 1)
        if self.window and self._is_decode(chunk):
            _expect(len(chunk.token_ids) <= self.window, chunk, "longer than a window")
            behind = not any(point.position > chunk.start for point in chunk.checkpoints)
            _expect(behind or not chunk.num_drafts, chunk, "a state among drafts is asked for")
            self._accepted[chunk.slot] = held - chunk.start if behind else 0
            held, end = (chunk.start, chunk.start) if behind else (held, end)
        digest = _extended(prefix[: end + 1], new_ids[: held - end])[-1]
        for group, page in enumerate(chunk.state_pages):
            self.memory["pool"][page] = [(group, held, digest)]
        for checkpoint in chunk.checkpoints:
            at = checkpoint.position
            _expect(chunk.start <= at <= end, chunk, f"checkpoint at {at}")
            for group, page in enumerate(checkpoint.pages):
                self.memory["pool"][page] = [(group, at, prefix[at])]

    def _logprobs(
        self, request: Request, new_ids: tuple[int, ...]
    ) -> tuple[TokenLogprobs, ...] | None:
        top = request.params.logprobs
        if top is None:
            return None
        return tuple(
            TokenLogprobs(-0.5, tuple(((i + n) % self.vocab_size, -0.5 - n) for n in range(top)))
            for i in new_ids
        )

    def _drafted(self, chunk: Chunk) -> Chunk:
        """A chunk with guesses, two of three right."""
        ids = list(chunk.token_ids[: -chunk.num_drafts])
        prompt = self.expand(chunk.request).ids if chunk.request.media else chunk.request.prompt_ids
        for _ in range(chunk.num_drafts):
            known = [*prompt, *chunk.output_ids, *ids[1:]]
            right = self.script(chunk.request, known)
            ids.append((right + (hash(tuple(known)) % 3 == 0)) % self.vocab_size)
        return replace(chunk, token_ids=tuple(ids))

    def _is_decode(self, chunk: Chunk) -> bool:
        few = chunk.samples and chunk.start > 0 and len(chunk.token_ids) <= self.window
        decodes = few and bool(chunk.output_ids) and not chunk.inner_checkpoints
        return decodes or bool(self._accepted.get(chunk.slot))

    def _choose(self, chunk: Chunk, known: list[int]) -> tuple[int, ...]:
        """Drafts that the script agrees with, and one more id."""
        new_ids: list[int] = []
        for draft in (*chunk.drafts, None):
            new_ids.append(self.script(chunk.request, [*known, *new_ids]))
            if new_ids[-1] != draft:
                break
        return tuple(new_ids)

    def _prefix(self, chunk: Chunk, known: list[int], prompt: Prompt) -> list[int]:
        """Digests of known[:0], known[:1], ...; kept while the slot is not forgotten."""
        request = chunk.request
        owner, prefix = self._prefixes.get(chunk.slot, (request.id, []))
        _expect(owner == request.id, chunk, f"its slot {chunk.slot} was not forgotten by {owner}")
        if not prefix:
            name = f"{self.version}/{request.salt}".encode()
            prefix.append(int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "little"))
            pictures: dict[int, int] = {}
            digests = request.media.digests if request.media else ()
            for (start, length), digest in zip(prompt.media, digests, strict=True):
                pictures[start] = int.from_bytes(digest, "little")
                pictures.update((start + i, i) for i in range(1, length))
            for at, token in enumerate(prompt.ids):
                prefix.append(hash((prefix[-1], token, pictures.get(at))))
        prefix[:] = _extended(prefix, known[len(prefix) - 1 :])
        self._prefixes[chunk.slot] = request.id, prefix
        return prefix

    def _read(self, chunk: Chunk, prefix: list[int]) -> None:
        """All latents before the chunk, and the state at its start."""
        size, pool = self.geometry.page_tokens, self.memory["pool"]
        needed = -(-chunk.end // size)
        _expect(len(chunk.latent_pages) == needed, chunk, f"{len(chunk.latent_pages)} pages")
        for index in range(-(-chunk.start // size)):
            cells = pool.get(chunk.latent_pages[index], [])
            upto = min(size, chunk.start - index * size)
            right = prefix[index * size + 1 : index * size + 1 + upto]
            _expect(cells[:upto] == right, chunk, f"latent page {index}: {cells[:upto]}, {right}")
        if chunk.start:
            at = chunk.start - self._accepted.get(chunk.slot, 0)
            for group, page in enumerate(chunk.state_pages):
                right = [(group, at, prefix[at])]
                _expect(pool.get(page) == right, chunk, f"state {pool.get(page)}, not {right}")

    def _write(self, chunk: Chunk, prefix: list[int]) -> None:
        """The latents of its tokens, drafts included."""
        size, pool = self.geometry.page_tokens, self.memory["pool"]
        path = _extended(prefix[: chunk.start + chunk.num_known + 1], chunk.drafts)
        for at in range(chunk.start, chunk.end):
            cells = pool.setdefault(chunk.latent_pages[at // size], [])
            if len(cells) < size:
                cells.extend(["blank"] * (size - len(cells)))
            cells[at % size] = path[at + 1]


def _extended(prefix: list[int], ids: Sequence[int]) -> list[int]:
    """Digests after more ids (which are no pictures)."""
    prefix = list(prefix)
    for token in ids:
        prefix.append(hash((prefix[-1], token, None)))
    return prefix


def _expect(good: bool, chunk: Chunk, what: str) -> None:
    if not good:
        raise WrongMemoryError(f"{chunk.request.id} at {chunk.start}: {what}")


def _check_tokens(chunk: Chunk, known: list[int]) -> None:
    """They are those of `known`, prompt and output, but for drafts, which stand where they may."""
    end = chunk.start + chunk.num_known
    _expect(chunk.num_known > 0, chunk, "no new token")
    ids = list(chunk.token_ids[: chunk.num_known])
    _expect(ids == known[chunk.start : end], chunk, "other tokens")
    _expect(chunk.samples == (end == len(known)), chunk, "samples at the wrong token")
    _expect(bool(chunk.output_ids) or not chunk.num_drafts, chunk, "drafts behind a prompt")
    _expect(chunk.samples or not chunk.num_drafts, chunk, "drafts inside a prompt")


def _check_owners(plan: StepPlan, geometry: Geometry) -> None:
    """No page is written by one chunk and touched by another, or for two purposes by one."""
    written: dict[int, str] = {}
    read: dict[int, str] = {}
    for chunk in plan.chunks:
        first = chunk.start // geometry.page_tokens
        mine = [*chunk.latent_pages[first:], *chunk.state_pages]
        mine += [page for checkpoint in chunk.checkpoints for page in checkpoint.pages]
        _expect(len(chunk.state_pages) == geometry.kda_groups, chunk, "pages of its state")
        for page in mine:
            _expect(0 <= page < geometry.num_pages, chunk, f"there is no page {page}")
            _expect(page not in written, chunk, f"page {page} also of {written.get(page)}")
            written[page] = chunk.request.id
        read.update(dict.fromkeys(chunk.latent_pages[:first], chunk.request.id))
    both = written.keys() & read.keys()
    if both:
        raise WrongMemoryError(f"pages {sorted(both)} are written by one and read by another")
