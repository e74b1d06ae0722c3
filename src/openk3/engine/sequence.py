"""One request on its way: what is known of it, and the memory it holds."""

from bisect import bisect_right
from concurrent.futures import Future

from openk3.engine.cache.hashing import Chain
from openk3.engine.cache.remote import Piece, Wanted
from openk3.engine.cache.store import Holding
from openk3.engine.drafts import Grams
from openk3.engine.plan import Prompt
from openk3.engine.types import Request, TokenLogprobs

KEPT_MESSAGES = 3
"""Messages at the head of a prompt whose ends are worth a checkpoint: tools, effort, system."""


class Sequence:
    """The scheduler's record of a request. `ids` is its expanded prompt and its output."""

    __slots__ = (
        "aborted",
        "admissions",
        "arrived",
        "cached_tokens",
        "chain",
        "computed",
        "estimate",
        "fetch",
        "grams",
        "ids",
        "inflight",
        "kept",
        "latent_pages",
        "latents",
        "live",
        "marks",
        "num_prompt",
        "output",
        "passed",
        "pending",
        "rank",
        "request",
        "scores",
        "slot",
        "stop_ids",
    )

    def __init__(
        self, request: Request, prompt: Prompt, chain: Chain, arrival: int, now: float, end_id: int
    ) -> None:
        self.request = request
        self.ids = list(prompt.ids)
        self.num_prompt = len(self.ids)
        self.output: list[int] = []
        self.chain = chain
        self.rank = (-request.priority, arrival)
        """The smallest goes first; it is never preempted for a larger one."""
        self.arrived = now
        stops = set(request.params.stop_ids)
        self.stop_ids = stops if request.params.ignore_eos else stops | {end_id}
        self.marks = turn_ends(self.ids, end_id, chain.block)
        self.estimate = self.num_prompt
        """Tokens to compute before its first new one, by the last lookup."""
        self.fetch: tuple[Wanted, Future[list[Piece]]] | None = None
        """What is asked of the external store, until it has landed."""
        self.passed = 0
        """How often a later one was admitted because this one lacked pages."""
        self.scores: list[TokenLogprobs] = []
        """Of the prompt's tokens behind its first, as far as computed, if asked for."""
        self.cached_tokens = 0
        self.admissions = 0
        self.grams = Grams()
        self.aborted = False
        self.close()

    def close(self) -> None:
        """Holds no memory and no slot."""
        self.slot = -1
        self.computed = 0
        """Positions whose latents and state the pages hold."""
        self.latents: list[Holding] = []
        self.latent_pages: tuple[int, ...] = ()
        self.live: tuple[int, ...] = ()
        self.inflight: Holding | None = None
        """Its own newest checkpoint, if that is to be recycled by the next."""
        self.kept: list[Holding] = []
        self.pending: list[Holding] = []
        """Checkpoints of the passes under way, by position."""

    @property
    def remaining(self) -> int:
        """Known tokens still to be computed: 1 when decoding."""
        return len(self.ids) - self.computed

    @property
    def skippable(self) -> int:
        """Leading tokens whose memory may come from the cache: what is asked of them is known."""
        wants = self.request.params.prompt_logprobs is not None and not self.output
        return len(self.scores) if wants else len(self.ids)

    @property
    def budget(self) -> int:
        """New tokens it may still generate."""
        return self.request.params.max_tokens - len(self.output)

    def mark_keys(self, start: int) -> list[bytes]:
        """Keys of the prefixes after `start` that it is to leave a checkpoint of."""
        keys, block = self.chain.keys, self.chain.block
        return [keys[at // block - 1] for at in self.marks_within(start, len(keys) * block)]

    def marks_within(self, start: int, end: int) -> list[int]:
        """Positions in (start, end] where a checkpoint is to be kept."""
        return self.marks[bisect_right(self.marks, start) : bisect_right(self.marks, end)]


def turn_ends(ids: list[int], end_id: int, hash_block: int) -> list[int]:
    """Block ends at or before: the prompt's end, its last token, its first messages' ends."""
    ends = [len(ids), len(ids) - 1]
    start = 0
    for _ in range(min(KEPT_MESSAGES, ids.count(end_id))):
        start = ids.index(end_id, start) + 1
        ends.append(start)
    return sorted({end // hash_block * hash_block for end in ends} - {0})
