"""Drafts of an MTP layer: what it would say over dense memory, and never a token of their own."""

import itertools
import random

import pytest
import torch

from openk3.engine import Engine, EngineConfig, Request, SamplingParams
from openk3.engine.layer_drafts import LayerDrafts
from openk3.engine.plan import UNKNOWN
from small_models import lively_model

BLOCK, PAGE = 8, 32
FEW = {5: 100.0, 6: 100.0, 7: 100.0}


@pytest.fixture(scope="module")
def model():
    return lively_model(seed=5, mtp=True)


def engine(model, **options):
    sizes = {"hash_block": BLOCK, "page_tokens": PAGE, "num_pages": 400, "debug": True}
    return Engine(model, EngineConfig(**{**sizes, "num_drafts": 3, "draft": "mtp", **options}))


@torch.no_grad()
def dense_drafts(model, known, count):
    """Guesses behind `known` ids: pairs of the trunk's hidden states, then of the layer's own."""
    hidden, ids = model.hidden(torch.tensor([known[:-1]])), list(known[1:])
    bias = torch.zeros(model.config.vocab_size)
    bias[list(FEW)] = torch.tensor(list(FEW.values()))
    for _ in range(count):
        last = model.mtp_hidden(hidden, torch.tensor([ids]))[:, -1:]
        ids.append(int((model.lm_head(last)[0, 0] + bias).argmax()))
        hidden = torch.cat([hidden, last], 1)
    return tuple(ids[len(ids) - count :])


KINDS = {
    "roomy": {},
    "plain steps": {"compiled": False},
    "small chunks": {"max_batch_tokens": 7},
    "short of pages": {"num_pages": 13, "host_bytes": 1 << 22},
    "no cache": {"prefix_cache": False},
    "two-phase mixes": {"two_phase": True, "compiled": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_the_layers_own(model, kind, monkeypatch):
    """Behind prompts in chunks, prefixes from the cache, rejected windows, and preemptions."""
    made, draft = [], LayerDrafts.draft

    def spy(self, chunks):
        drafted = draft(self, chunks)
        made.extend(
            (c, tuple(c.output_ids)) for c, old in zip(drafted, chunks, strict=True) if c != old
        )
        return drafted

    monkeypatch.setattr(LayerDrafts, "draft", spy)
    serving, rng = engine(model, **KINDS[kind]), random.Random(kind)
    stem = tuple(rng.randrange(200) for _ in range(80))
    for turn, length in enumerate((1, BLOCK, PAGE, 2 * PAGE + 1, 70, 2 * PAGE, 75)):
        own = tuple(rng.randrange(200) for _ in range(turn % 3))
        params = SamplingParams(max_tokens=14, temperature=0, logit_bias=FEW, ignore_eos=True)
        serving.add(Request(f"r{turn}", stem[:length] + own, params))
        for _ in range(3 * (turn % 2)):
            serving.step()
    while serving.busy:
        serving.step()
        if "short" in kind and len(serving.scheduler.running) > 2:
            serving.scheduler.preempt(serving.scheduler.running[-1])
    assert len(made) > 30
    assert not any(UNKNOWN in chunk.token_ids for chunk, _ in made)
    for chunk, outputs in made:
        wanted = dense_drafts(model, (*chunk.request.prompt_ids, *outputs), chunk.num_drafts)
        assert chunk.token_ids[1:] == wanted
    stats = serving.stats()
    assert stats.drafted_tokens > stats.accepted_tokens > 0
    assert (stats.cached_tokens > 0) == (kind != "no cache")
    assert (stats.preemptions > 0) == (kind == "short of pages")


def test_samples_keep_their_distribution(model):
    """Three tokens, sampled among three: 27 sequences, chi-square against the model's own odds."""
    prompt, count = (3, 4, 5, 6), 1500
    odds = {}
    bias = torch.full((model.config.vocab_size,), -torch.inf)
    bias[list(FEW)] = 0.0
    for ids in itertools.product(FEW, repeat=3):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids[:2]]]))[0, -3:]
        logp = (logits + bias).log_softmax(-1)
        odds[ids] = float(logp[torch.arange(3), list(ids)].sum().exp())
    assert abs(sum(odds.values()) - 1) < 1e-4
    serving = engine(
        model, num_drafts=2, debug=False, max_running=64, hash_block=64, page_tokens=64
    )
    seen = dict.fromkeys(odds, 0)
    answers = {f"s{i}": [] for i in range(count)}
    for name in answers:
        serving.add(Request(name, prompt, SamplingParams(max_tokens=3, logit_bias=FEW)))
    while serving.busy:
        for output in serving.step():
            answers[output.request_id] += output.new_ids
    for ids in answers.values():
        seen[tuple(ids)] += 1
    chi_square = sum((seen[ids] - count * p) ** 2 / (count * p) for ids, p in odds.items())
    # 26 degrees of freedom: mean 26, deviation 7.2
    assert chi_square < 26 + 4 * 7.2
    assert serving.stats().accepted_tokens > 0.2 * serving.stats().drafted_tokens


def test_rows_with_and_without_drafts_share_steps(model):
    """One that ends soon has no room for guesses, one with a grammar none at all."""

    class Anything:
        def allowed(self):
            return None

        def accept(self, token_id):
            pass

    def serve(**options):
        serving, ids = engine(model, **options), {}
        for i, new in enumerate((20, 2, 20)):
            params = SamplingParams(max_tokens=new, temperature=0, logit_bias=FEW)
            constraint = Anything() if i == 2 else None
            serving.add(Request(f"r{i}", tuple(range(9 + i, 40)), params, constraint=constraint))
        while serving.busy:
            for output in serving.step():
                ids.setdefault(output.request_id, []).extend(output.new_ids)
        return ids, serving.stats()

    plain, _ = serve(num_drafts=0)
    drafted, stats = serve()
    assert drafted == plain
    assert stats.accepted_tokens > 0
