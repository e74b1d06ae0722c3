"""How much is reused, to the token, against a model that keeps prefixes in plain sets."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import END, Driver
from openk3.engine.scripted import from_prefix
from openk3.engine.sequence import KEPT_MESSAGES


class NaiveCache:
    """Prefixes with latents, and prefixes with a state, of requests one after another."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.latents: set[tuple[int, ...]] = set()
        self.states: set[tuple[int, ...]] = set()

    def floor(self, position: int) -> int:
        return position // self.block * self.block

    def serve(self, prompt: tuple[int, ...], ids: tuple[int, ...]) -> int:
        """Reused tokens of a request; then remember what it leaves behind."""
        ends = range(self.floor(len(prompt) - 1), 0, -self.block)
        chain = next((end for end in ends if prompt[:end] in self.latents), 0)
        hit = next((end for end in ends if end <= chain and prompt[:end] in self.states), 0)
        known = (prompt + ids)[:-1]
        self.latents |= {known[:end] for end in range(self.block, len(known) + 1, self.block)}
        messages = [at + 1 for at, token in enumerate(prompt) if token == END][:KEPT_MESSAGES]
        turns = [len(prompt), len(prompt) - 1, len(known), chain, *messages]
        self.states |= {known[: self.floor(end)] for end in turns if self.floor(end) > hit}
        return hit


@settings(max_examples=100, deadline=None)
@given(
    block=st.sampled_from([1, 3, 4]),
    pages_of=st.integers(1, 4),
    groups=st.integers(1, 3),
    budget=st.sampled_from([1, 3, 7, 16, 100]),
    drafts=st.sampled_from([0, 3]),
    overlap=st.booleans(),
    data=st.data(),
)
def test_hits_are_those_of_the_naive_cache(block, pages_of, groups, budget, drafts, overlap, data):
    driver = Driver(
        num_pages=600,
        kda_groups=groups,
        page_tokens=block * pages_of,
        hash_block=block,
        max_batch_tokens=budget,
        overlap=overlap and not drafts,
        num_drafts=drafts,
        script=from_prefix(4, memory=2),
    )
    naive = NaiveCache(block)
    texts: list[tuple[int, ...]] = [()]
    some_ids = st.lists(st.sampled_from([2, 3, 4, END]), min_size=1, max_size=14)
    for _ in range(data.draw(st.integers(1, 6))):
        head = data.draw(st.sampled_from(texts))
        head = head[: data.draw(st.integers(0, len(head)))]
        prompt = (*head, *data.draw(some_ids))
        served = driver.run(prompt, data.draw(st.integers(1, 12)), ignore_eos=True)
        ids = tuple(served.ids)
        assert served.cached == naive.serve(prompt, ids)
        texts.append(prompt + ids)
    stats = driver.engine.stats()
    prompts = sum(len(served.request.prompt_ids) for served in driver.served.values())
    outputs = sum(len(served.ids) - 1 for served in driver.served.values())
    rejected = stats.drafted_tokens - stats.accepted_tokens
    # Nothing is computed twice, and nothing that was cached.
    assert stats.computed_tokens - rejected == prompts - stats.cached_tokens + outputs
