"""Choosing tokens: filters, penalties, and noise that belongs to a position alone."""

import math

import pytest
import torch

from openk3.engine.sampling import Row, _key, _uniform, choose
from openk3.engine.types import Request, SamplingParams
from openk3.errors import InputError

VOCAB = 64


def row(position=5, prompt=(1, 2), outputs=(), constraint=None, id="r", **params):
    request = Request(id, prompt, SamplingParams(**params), constraint=constraint)
    return Row(request, position, outputs, constrained=constraint is not None)


def logits(rows=1, seed=0, scale=2.0):
    rng = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, VOCAB, generator=rng)


def ids(scores, rows, seed=0):
    return [choice.token_id for choice in choose(scores, rows, seed)]


def many(scores, count=4000, **params):
    """How often each token comes, over positions of one request."""
    rows = [row(position, **params) for position in range(count)]
    got = torch.tensor(ids(scores.expand(count, -1), rows))
    return torch.bincount(got, minlength=VOCAB)


def test_samples_follow_the_distribution():
    scores, count = logits(scale=1.0), 20000
    expected = scores[0].softmax(-1) * count
    got = many(scores, count, seed=3)
    chi_square = float(((got - expected) ** 2 / expected).sum())
    # 63 degrees of freedom: mean 63, deviation 11.2
    assert chi_square < 63 + 5 * 11.2


def test_temperature_sharpens():
    scores = logits()
    expected = (scores[0] / 0.5).softmax(-1)
    share = many(scores, 8000, temperature=0.5).double() / 8000
    assert float((share - expected).abs().max()) < 0.03
    tiny = row(temperature=1e-30)
    assert ids(scores, [tiny]) == [int(scores.argmax())]


@pytest.mark.parametrize("all_of", [{"top_k": 10**30}, {"top_p": 1 - 1e-16}, {"min_p": 1e-320}])
def test_a_filter_of_any_size_is_a_filter(all_of):
    scores = logits(rows=50, seed=2)
    plain, filtered = ([row(i, **params) for i in range(50)] for params in ({}, all_of))
    assert ids(scores, filtered) == ids(scores, plain)


@pytest.mark.parametrize(
    "little",
    [{"temperature": 1e-320}, {"temperature": 1e-320, "top_k": 3}, {"top_p": 1e-320},
     {"temperature": 1e-320, "top_p": 0.5, "min_p": 0.1}],
)  # fmt: skip
def test_the_least_of_a_number_takes_the_likeliest(little):
    scores = logits(rows=20, seed=4)
    rows = [row(i, **little) for i in range(20)]
    assert ids(scores, rows) == scores.argmax(-1).tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_biases_are_finite(value):
    with pytest.raises(InputError, match="logit_bias must be finite"):
        SamplingParams(logit_bias={3: value})


@pytest.mark.parametrize(
    ("params", "kept"),
    [({"top_k": 3}, 3), ({"top_p": 0.5}, None), ({"min_p": 0.3}, None), ({"top_k": 1}, 1)],
)
def test_filters_keep_the_likeliest(params, kept):
    scores = logits()
    probs = scores[0].softmax(-1)
    ordered, index = probs.sort(descending=True)
    if "top_p" in params:
        kept = int((ordered.cumsum(0) - ordered < params["top_p"]).sum())
    if "min_p" in params:
        kept = int((ordered >= params["min_p"] * ordered[0]).sum())
    seen = many(scores, 3000, **params).nonzero()[:, 0].tolist()
    assert set(seen) == set(index[:kept].tolist())


def by_full_sort(scores, r, seed):
    """What a row chooses, by the definition of the filters over the sorted vocabulary."""
    p, vocab = r.request.params, scores.shape[1]
    scores = (scores - scores.amax(-1, keepdim=True)) / p.temperature
    ordered, index = scores.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(-1)
    out = torch.arange(vocab)[None] >= (p.top_k or vocab)
    out |= (probs.cumsum(-1) - probs >= p.top_p) & (p.top_p < 1)
    out |= probs < p.min_p * probs[:, :1]
    out[:, 0] = False
    scores = scores.masked_fill(torch.zeros_like(out).scatter(-1, index, out), -torch.inf)
    noise = _uniform([_key(r, seed)], torch.arange(vocab)[None])
    return int((scores - (-noise.log()).log()).argmax())


@pytest.mark.parametrize("vocab", [50, 3000, 40000])
@pytest.mark.parametrize("logits", ["spread", "flat", "tied", "all tied", "mostly masked"])
def test_filters_choose_as_over_the_sorted_vocabulary(vocab, logits):
    rng = torch.Generator().manual_seed(vocab)
    scores = torch.randn(12, vocab, generator=rng)
    scores = {
        "spread": 5 * scores,
        "flat": 0.1 * scores,
        "tied": scores.round(),
        "all tied": torch.zeros_like(scores),
        "mostly masked": scores.masked_fill(torch.arange(vocab) % 7 > 0, -torch.inf),
    }[logits]
    filters = [{"top_p": 0.95}, {"top_p": 0.3}, {"top_k": 20}, {"top_k": 700, "top_p": 0.9}]
    filters += [{"min_p": 0.2}, {"min_p": 0.01, "top_p": 0.99, "temperature": 0.6}]
    rows = [row(i, seed=i, **filters[i % len(filters)]) for i in range(12)]
    expected = [by_full_sort(scores[i : i + 1], rows[i], 0) for i in range(12)]
    assert ids(scores, rows) == expected
    assert [ids(scores[i : i + 1], rows[i : i + 1])[0] for i in range(12)] == expected


def test_rows_of_every_kind_share_a_batch():
    scores = logits(6)
    kinds = [{"temperature": 0.0}, {}, {"top_p": 0.5}]
    rows = [row(i, seed=1, **kinds[i % 3]) for i in range(6)]
    alone = [ids(scores[i : i + 1], rows[i : i + 1])[0] for i in range(6)]
    assert ids(scores, rows) == alone
    assert ids(scores[[1, 2]], rows[1:3]) == alone[1:3]


def test_noise_belongs_to_the_position_not_to_the_batch():
    scores = logits(6)
    rows = [row(position=i, id=f"r{i % 2}", seed=None if i % 2 else 9) for i in range(6)]
    together = ids(scores, rows, seed=4)
    alone = [ids(scores[i : i + 1], rows[i : i + 1], seed=4)[0] for i in range(6)]
    assert together == alone
    greedy = row(temperature=0)
    mixed = ids(torch.cat([logits(1, 7), scores]), [greedy, *rows], seed=4)
    assert mixed[1:] == together


def test_noise_is_a_fixed_function_of_key_and_id():
    def mix(x):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    keys, tokens = [(0, 0), (0xFFFFFFFF, 0x80000000), (0x12345678, 0xDEADBEEF)], range(200_000)
    got = _uniform(keys, torch.arange(len(tokens))[None])
    for (low, high), numbers in zip(keys, got, strict=True):
        some = [*tokens[:300], *tokens[::997]]
        wanted = [((mix((mix(i ^ low) + high) % 2**32) >> 9) + 0.5) * 2.0**-23 for i in some]
        assert numbers[some].tolist() == wanted


def test_seeds_and_ids_give_different_streams():
    scores = logits(scale=0.1).expand(50, -1)
    streams = [
        ids(scores, [row(i, **params) for i in range(50)], seed=seed)
        for params, seed in [
            ({"seed": 1}, 0),
            ({"seed": 2}, 0),
            ({"id": "a"}, 0),
            ({"id": "b"}, 0),
            ({"id": "a"}, 1),
        ]
    ]
    assert len({tuple(stream) for stream in streams}) == 5
    assert ids(scores, [row(i, seed=1, id="x") for i in range(50)], seed=5) == streams[0]


def test_penalties_and_bias_change_the_scores():
    scores = torch.zeros(1, VOCAB)
    scores[0, 7], scores[0, 8], scores[0, 9] = 3.0, 2.5, 2.0
    greedy = {"temperature": 0.0}
    assert ids(scores, [row(**greedy)]) == [7]
    assert ids(scores, [row(outputs=(7,), presence_penalty=1, **greedy)]) == [8]
    assert ids(scores, [row(outputs=(7, 7, 8), frequency_penalty=0.6, **greedy)]) == [9]
    assert ids(scores, [row(prompt=(7, 8), repetition_penalty=2, **greedy)]) == [9]
    assert ids(scores, [row(logit_bias={40: 50.0, 7: -100.0}, **greedy)]) == [40]
    assert scores[0, 7] == 3.0, "the caller's logits are not touched"


def test_a_grammar_allows_only_its_tokens():
    class Only:
        def allowed(self):
            mask = torch.zeros(VOCAB, dtype=torch.bool)
            mask[[11, 12]] = True
            return mask

    scores = logits()
    got = {ids(scores, [row(i, constraint=Only())])[0] for i in range(40)}
    assert got == {11, 12}


def test_logprobs_are_the_models_own():
    scores = logits(2)
    rows = [row(temperature=0.3, top_k=2, logprobs=3), row(temperature=0)]
    first, second = choose(scores, rows, 0)
    logp = scores.log_softmax(-1)
    assert second.logprobs is None
    assert math.isclose(first.logprobs.chosen, float(logp[0, first.token_id]), abs_tol=1e-6)
    values, index = logp[0].topk(3)
    assert [i for i, _ in first.logprobs.top] == index.tolist()
    assert [x for _, x in first.logprobs.top] == pytest.approx(values.tolist(), abs=1e-6)


def test_a_row_of_nan_fails_alone():
    scores = logits(3)
    scores[1] = torch.nan
    choices = choose(scores, [row(i) for i in range(3)], 0)
    assert [choice.error is None for choice in choices] == [True, False, True]
