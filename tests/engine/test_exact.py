"""A served answer is the model's own: whatever is cached, cut, preempted or drafted."""

import random

import pytest
import torch

from openk3.engine import Engine, EngineConfig, Request, SamplingParams
from openk3.model import DenseCache
from small_models import lively_model

BLOCK, PAGE = 8, 32
FEW = {5: 100.0, 6: 100.0, 7: 100.0}
KINDS = {
    "roomy": {"num_pages": 400},
    "one token at a time": {"num_pages": 400, "max_batch_tokens": 5, "max_running": 3},
    "short of pages": {"num_pages": 26},
    "host tier": {"num_pages": 26, "host_bytes": 1 << 24},
    "two-phase mixes": {"num_pages": 400, "two_phase": True, "compiled": False},
    "a step ahead": {"num_pages": 400, "overlap": True},
    "a step ahead, short of pages": {"num_pages": 26, "overlap": True, "host_bytes": 1 << 23},
    "drafts": {"num_pages": 400, "num_drafts": 3},
    "drafts, short of pages": {"num_pages": 30, "num_drafts": 2, "host_bytes": 1 << 23},
    "layer drafts": {"num_pages": 400, "num_drafts": 3, "draft": "mtp"},
    "layer drafts in plain steps": {
        "num_pages": 400,
        "num_drafts": 3,
        "draft": "mtp",
        "compiled": False,
    },
    "layer drafts, short of pages": {
        "num_pages": 30,
        "num_drafts": 2,
        "draft": "mtp",
        "host_bytes": 1 << 23,
        "max_batch_tokens": 21,
    },
    "plain steps": {"num_pages": 400, "compiled": False},
    "plain steps, drafts, short of pages": {"num_pages": 30, "num_drafts": 2, "compiled": False},
    "no cache": {"num_pages": 400, "prefix_cache": False},
}


@pytest.fixture(scope="module")
def model():
    return lively_model(seed=3, mtp=True)


class Alone:
    """The model's own greedy answers over dense caches, each computed once."""

    def __init__(self, model):
        self.model = model
        self.answers = {}

    @torch.no_grad()
    def answer(self, prompt, count):
        """(ids, log-probabilities), chosen among FEW tokens so that answers repeat themselves."""
        if (prompt, count) not in self.answers:
            bias = torch.zeros(self.model.config.vocab_size)
            bias[list(FEW)] = torch.tensor(list(FEW.values()))
            cache, ids, logprobs = DenseCache(), list(prompt), []
            fresh = ids
            for _ in range(count):
                logits = self.model(torch.tensor([fresh]), state=cache, logits_for="last")[0, 0]
                fresh = [int((logits + bias).argmax())]
                logprobs.append(float(logits.log_softmax(-1)[fresh[0]]))
                ids += fresh
            self.answers[prompt, count] = ids[len(prompt) :], logprobs
        return self.answers[prompt, count]


@pytest.fixture(scope="module")
def alone(model):
    return Alone(model)


def conversations(seed):
    """(prompt, new tokens): prompts with common beginnings of lengths around blocks and pages."""
    rng = random.Random(seed)
    stem = [rng.randrange(200) for _ in range(3 * PAGE)]
    requests = []
    for length in (BLOCK, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 13, 3 * PAGE - 1):
        tail = [rng.randrange(200) for _ in range(rng.choice((0, 1, 2, 9)))]
        requests.append((tuple(stem[:length] + tail), rng.choice((1, 7, 20))))
    requests += [requests[-1], (tuple(stem[:1]), 3)]
    rng.shuffle(requests)
    return requests


def serve(engine, requests, rng):
    """Answers of requests that arrive at random moments."""
    waiting = [(f"q{i}", *request) for i, request in enumerate(requests)]
    ids = {name: [] for name, *_ in waiting}
    logprobs = {name: [] for name, *_ in waiting}
    cached, steps = {}, 0
    while waiting or engine.busy:
        while waiting and (not engine.busy or rng.random() < 0.4):
            name, prompt, count = waiting.pop(0)
            params = SamplingParams(max_tokens=count, temperature=0, logprobs=0, logit_bias=FEW)
            engine.add(Request(name, prompt, params))
        for output in engine.step():
            assert output.error is None
            ids[output.request_id] += output.new_ids
            logprobs[output.request_id] += [x.chosen for x in output.logprobs or ()]
            cached[output.request_id] = output.cached_tokens
        steps += 1
        assert steps < 5000
    return ids, logprobs, cached


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_models_own(model, alone, kind):
    engine = Engine(
        model,
        EngineConfig(hash_block=BLOCK, page_tokens=PAGE, debug=True, **KINDS[kind]),
    )
    rng = random.Random(kind)
    idle = None
    for seed in (1, 1):
        requests = conversations(seed)
        ids, logprobs, _ = serve(engine, requests, rng)
        for i, (prompt, count) in enumerate(requests):
            wanted_ids, wanted = alone.answer(prompt, count)
            assert ids[f"q{i}"] == wanted_ids
            torch.testing.assert_close(logprobs[f"q{i}"], wanted, atol=1e-4, rtol=0)
        stats = engine.stats()
        assert idle is None or stats.free_pages == idle
        idle = stats.free_pages
    if kind == "no cache":
        assert stats.cached_tokens == 0
    else:
        assert stats.cached_tokens > 0
    if "drafts" in kind:
        assert stats.drafted_tokens > stats.accepted_tokens > 0
    if "host" in kind:
        assert stats.host_hits > 0


@pytest.mark.parametrize("compiled", [None, False])
def test_batch_invariant_answers_are_equal_to_the_last_bit(model, compiled):
    """Alone, and among others in small steps with too few pages, drafts and a warm cache."""
    rng = random.Random(4)
    sizes = {"hash_block": BLOCK, "page_tokens": PAGE, "batch_invariant": True, "debug": True}
    sizes["compiled"] = compiled
    requests = [*conversations(5)[:5], (tuple([9, 8, 7] * 9), 40)]
    seen = []
    few = {"num_pages": 26, "num_drafts": 3, "max_batch_tokens": 9}
    for options in ({"num_pages": 400}, few):
        engine = Engine(model, EngineConfig(**sizes, **options))
        for _ in range(2):
            ids, logprobs, _ = serve(engine, requests, rng)
            seen.append((ids, logprobs))
    assert engine.stats().cached_tokens > 0
    assert engine.stats().accepted_tokens > 0
    for other in seen[1:]:
        assert other == seen[0]


@pytest.mark.parametrize("source", ["ngram", "mtp"])
def test_drafts_do_not_change_samples(model, source):
    """Temperature 1: noise belongs to positions, so that a drafted run is the plain run."""
    answers = []
    for drafts in (0, 3):
        sizes = {"hash_block": BLOCK, "page_tokens": PAGE, "num_pages": 200}
        engine = Engine(model, EngineConfig(**sizes, num_drafts=drafts, draft=source))
        params = SamplingParams(max_tokens=60, temperature=0.7, seed=5, logit_bias=FEW)
        engine.add(Request("a", (3, 4, 5) * 6, params))
        ids = []
        while engine.busy:
            for output in engine.step():
                ids += output.new_ids
        answers.append(ids)
        if drafts:
            assert engine.stats().accepted_tokens > 0
    assert answers[0] == answers[1]
