"""Faults that users of other servers reported, each as a small check (public issues named).

What a test here cannot say itself, the scripted runner does: it raises when a chunk is given memory
that is not its own prefix's, so "equal to a cold run" is checked at every step of every test.
"""

import pytest

from engine_driver import END, Driver, H, P, random_ids
from openk3.engine.types import Media


@pytest.mark.parametrize("length", [P - 1, P, P + 1, 2 * P - 1, 2 * P, 2 * P + 1])
def test_a01_a_prompt_that_ends_at_a_page_end_is_reused(length):
    """vllm#50235: 3072 -> 3073 tokens reused nothing with pages of 1536."""
    ids = random_ids(length + 1)
    driver = Driver()
    driver.run(ids[:length])
    assert driver.run(ids).cached == length // H * H


def test_a02_the_memory_of_an_answer_is_reused():
    """sglang#31474: hits restored snapshots that nothing had written."""
    driver = Driver()
    first = driver.run(random_ids(3 * H + 7), 24)
    again = driver.run((*first.request.prompt_ids, *first.ids, *random_ids(20, seed=1)), 5)
    # The last id of an answer is never computed; the block end before it is that of 4 blocks.
    assert again.cached == (3 * H + 7 + 24 - 1) // H * H == 4 * H


@pytest.mark.parametrize("blocks", [1, 4, 5])
def test_a03_a_hit_may_leave_a_single_token(blocks):
    """sglang#29633: a tail of one token gave a wrong first token."""
    driver = Driver()
    ids = random_ids(blocks * H + 1)
    assert driver.run(ids).cached == 0
    assert driver.run(ids).cached == blocks * H
    assert [len(chunk.token_ids) for chunk in driver.runner.plans[-1].chunks] == [1]


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 100, 200])
def test_a04_chunks_of_any_size(budget):
    """vllm#52909: a prefill in chunks differed from one in one pass."""
    driver = Driver(max_batch_tokens=budget)
    served = driver.run(random_ids(200), 5)
    chunks = [plan.chunks[0] for plan in driver.runner.plans]
    assert [len(chunk.token_ids) for chunk in chunks[: 200 // budget]] == [budget] * (200 // budget)
    assert sum(len(chunk.token_ids) for chunk in chunks) == 200 + 4
    assert len(served.ids) == 5
    assert driver.run(random_ids(200)).cached == 12 * H


@pytest.mark.parametrize("drafts", [0, 3])
def test_a06_a_preempted_request_starts_over(drafts):
    """vllm-metal#488: resumed requests went on from a stale state."""
    driver = Driver(num_pages=16, num_drafts=drafts)
    both = [driver.add(random_ids(5 * P, seed=n), 3 * P) for n in range(2)]
    driver.drain()
    assert driver.engine.stats().preemptions >= 1
    assert [len(served.ids) for served in both] == [3 * P, 3 * P]
    driver.assert_idle()


def test_a07_pages_are_used_again_without_a_trace():
    """vllm#56524, sglang#24717: states of earlier requests leaked into short new ones."""
    driver = Driver(num_pages=24)  # debug mode fills what is blank with poison
    for n in range(50):
        driver.add(random_ids(1 + 7 * n % 90, seed=n), 5)
    driver.drain()
    assert any(plan.poison for plan in driver.runner.plans)
    driver.engine.reset()
    for length in (1, 2, 3, 5, 70):
        assert driver.run(random_ids(length), 6).cached == 0
    driver.assert_idle()


@pytest.mark.parametrize(("num_pages", "cached"), [(14, 0), (16, 4 * P)])
def test_a08_hits_are_pinned_before_pages_are_taken(num_pages, cached):
    """vllm#44409: the allocation for one group evicted the hit of another."""
    # X leaves 4 latent pages and 2 checkpoints of 2 pages; a guest takes 5. The hit's state and
    # what follows need 4 more: with 16 pages they fit if something other than the hit is evicted.
    driver = Driver(num_pages=num_pages)
    x = random_ids(4 * P)
    driver.run(x)
    guest = driver.add(random_ids(2 * P + 1, seed=1), P)
    driver.step()
    served = driver.add((*x, *random_ids(2 * P, seed=2)), 3)
    while guest.reason is None:
        driver.step()
        for plan in driver.runner.plans[-1:]:
            for chunk in plan.chunks:
                assert len(set(chunk.latent_pages)) == len(chunk.latent_pages)
    driver.drain()
    assert served.reason == "length"
    assert served.cached == cached
    driver.assert_idle()


def test_a08_when_nothing_else_runs_a_hit_that_does_not_fit_is_given_up():
    driver = Driver(num_pages=9)
    x = random_ids(4 * P + 1)
    driver.run(x)
    assert driver.engine.stats().cached_pages == 6
    served = driver.run((*x, *random_ids(2 * P, seed=2)), 3)
    assert (served.reason, served.cached) == ("length", 0)
    driver.assert_idle()


@pytest.mark.parametrize("lost", ["state", "latents"])
def test_a09_a_hit_needs_every_group(lost):
    """vllm#402 (fork): the longer hit of one group was taken for the whole model's."""
    driver = Driver()
    memory = driver.engine.memory
    prompt = random_ids(4 * H + 3)
    driver.run(prompt[: 2 * H + 1])
    driver.run(prompt)
    chain = memory.chain(
        driver.served["0"].request, driver.runner.expand(driver.served["1"].request)
    )
    free = memory.pool.free, memory.pool.idle_pages
    assert memory.lose(lost, chain.keys[3])
    assert memory.pool.free == free[0]
    # A checkpoint goes in all its groups at once; the page of 4 blocks is one page.
    assert free[1] - memory.pool.idle_pages == (2 if lost == "state" else 1)
    served = driver.run((*prompt, 5, 6, 7))
    assert served.cached == (2 * H if lost == "state" else 0)


def test_a10_the_same_prompt_of_whole_pages_twice():
    """nano-vllm#144: all blocks hit, nothing left to compute, crash."""
    driver = Driver()
    ids = random_ids(2 * P)
    driver.run(ids)
    served = driver.run(ids, 4)
    assert served.cached == 2 * P - H
    assert len(served.ids) == 4


def test_a11_three_of_the_same_prompt_in_one_step():
    """mini-sglang#142: duplicates were freed while a page table still led to them."""
    driver = Driver(num_pages=40)
    same = [driver.add(random_ids(150), 60) for _ in range(3)]
    for n in range(5):
        driver.add(random_ids(60 + 30 * n, seed=n + 1), 40)
    driver.drain()
    assert same[0].ids == same[1].ids == same[2].ids
    assert [served.cached for served in same] == [0, 9 * H, 9 * H]
    driver.assert_idle()


def test_a11_twins_that_are_computed_side_by_side():
    """The same, where the second does not wait: their common prefix ends at no turn."""
    driver = Driver(num_pages=40)
    common = random_ids(150)
    twins = [driver.add((*common, *random_ids(40, seed=n)), 30) for n in range(2)]
    driver.drain()
    assert [served.cached for served in twins] == [0, 0]
    assert driver.run((*common, *random_ids(40, seed=9))).cached == 0
    assert driver.run((*common, *random_ids(40, seed=10))).cached == 9 * H
    driver.assert_idle()


def test_a12_drafts_now_and_then():
    """vllm#56531: steps with and without drafts in turn corrupted hybrid models."""
    prompts = [random_ids(6, seed=1) * 9, random_ids(80, seed=2), random_ids(9) * 5, (5,) * 40]
    outputs = []
    for drafts in (0, 3):
        driver = Driver(num_drafts=drafts, max_batch_tokens=64)
        batch = [driver.add(prompt, 60) for prompt in prompts]
        driver.drain()
        outputs.append([served.ids for served in batch])
        rows = [len(chunk.token_ids) for plan in driver.runner.plans for chunk in plan.chunks]
        assert (driver.engine.stats().drafted_tokens > 0) == (drafts > 0)
        assert 1 in rows
    assert outputs[0] == outputs[1]


def test_a13_a_prefix_shorter_than_a_page_is_reused():
    """vllm#53749: nothing shorter than one attention block was ever hit."""
    driver = Driver()
    system = (*random_ids(2 * H + 4), END)
    driver.run((*system, *random_ids(30, seed=1)))
    assert driver.run((*system, *random_ids(30, seed=2))).cached == 2 * H
    assert driver.engine.stats().hash_block == H


def test_a14_chunks_that_cross_pages_anywhere():
    """qwen38-27b-rtx3090#43: state was lost where a chunk crossed a block."""
    driver = Driver(max_batch_tokens=50)
    driver.run(random_ids(400), 3)
    assert len(driver.runner.plans) == 8 + 2


def test_a15_a_short_request_passes_a_long_prefill():
    """ATOM#1835: 101 tokens waited 82 s behind a prefill of 600K."""
    budget = 64
    driver = Driver(max_batch_tokens=budget)
    decoding = driver.add(random_ids(10, seed=1), 500)
    driver.step()
    long = driver.add(random_ids(64 * budget, seed=2))
    driver.step()
    driver.step()
    start = driver.steps
    short = driver.add(random_ids(10, seed=3), 20)
    driver.drain()
    assert short.steps[0] - start <= 3
    assert decoding.steps == list(range(1, 501))
    assert long.steps[0] - (start - 1) <= 64 * 1.05 + 20


def test_a15_also_beside_two_long_prefills():
    driver = Driver(max_batch_tokens=64)
    for seed in (1, 2):
        driver.add(random_ids(64 * 64, seed=seed))
    driver.step()
    short = driver.add(random_ids(10, seed=3))
    for _ in range(3):
        driver.step()
    assert short.reason == "length"


@pytest.mark.parametrize("after", range(6))
def test_a16_an_abort_gives_everything_back(after):
    """pegainfer#215: requests ran to their end after the client had gone."""
    driver = Driver(max_batch_tokens=64)
    served = driver.add(random_ids(200), 500)
    for _ in range(after):
        driver.step()
    driver.engine.abort(served.request.id)
    stats = driver.engine.stats()
    assert stats.running == 0
    assert stats.free_pages == stats.pages
    assert [output.finish_reason for output in driver.step()] == ["abort"]
    driver.engine.abort(served.request.id)
    driver.engine.abort("nobody")
    assert not driver.engine.busy
    assert driver.step() == []
    driver.assert_idle()


def test_a16_an_abort_while_a_step_computes():
    driver = Driver()
    served = driver.add(random_ids(100), 500)
    other = driver.add(random_ids(90, seed=1), 4)
    compute = driver.runner.run

    def run(plan):
        driver.engine.abort(served.request.id)
        driver.engine.abort(served.request.id)
        return compute(plan)

    driver.runner.run = run
    driver.step()
    assert served.reason == "abort"
    assert served.ids == []
    driver.drain()
    assert len(other.ids) == 4
    driver.assert_idle()


def test_a27_pictures_separate_prefixes():
    """LMCache#4086: different pictures behind the same placeholder ids shared their memory."""
    driver = Driver()
    text = random_ids(2 * H)
    ids = (*text, driver.runner.media_id, driver.runner.media_id, *random_ids(40, seed=1))

    def ask(*digests):
        return driver.run(ids, media=Media(None, None, digests)).cached

    assert ask(b"a", b"b") == 0
    assert ask(b"c", b"b") == 0  # parts at two blocks, where the first left no checkpoint
    assert ask(b"b", b"a") == 2 * H
    assert ask(b"a", b"b") == (len(ids) + 6 - 1) // H * H
