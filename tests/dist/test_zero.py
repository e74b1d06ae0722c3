"""A sharded run makes the steps of one process: losses, norms, weights, clipping, collectives."""

import dataclasses

import pytest
import torch
from dist_workers import crew
from sharded_steps import train
from tiny_run import tiny_recipe, write_tiny_data

from openk3.config.recipe import ParallelRecipe
from openk3.errors import ConfigError
from openk3.parallel.world import World

pytestmark = pytest.mark.dist

LAYOUTS = {
    "zero 1": ParallelRecipe(zero=1),
    "zero 2, experts of two": ParallelRecipe(zero=2, expert=2),
    "zero 3, experts of four": ParallelRecipe(zero=3, expert=4),
    "zero 3, experts of four, unbalanced": ParallelRecipe(zero=3, expert=4, balance_experts=False),
    "zero 3, two copies": ParallelRecipe(zero=3, replicate=2),
    "zero 1, two copies, experts of two": ParallelRecipe(zero=1, replicate=2, expert=2),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    data = write_tiny_data(tmp_path_factory.mktemp("data") / "tiny")
    # rows of unequal length, two micro-batches, gradients and logits large enough to be clipped
    return tiny_recipe(
        data,
        data__sequence_tokens=7,
        train__batch_sequences=8,
        train__micro_sequences=1,
        optim__clip_norm=0.5,
        optim__logit_cap=2e-3,
        optim__lr=2e-2,
    )


@pytest.fixture(scope="module")
def want(recipe):
    return train(World(), recipe)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_makes_the_steps_of_one_process(recipe, want, name):
    parallel = LAYOUTS[name]
    found = crew(4).run(train, dataclasses.replace(recipe, parallel=parallel))
    results, held, buffers, _ = want
    assert any(r.clipped_heads for r in results)
    for theirs, pieces, biases, reductions in found:
        assert theirs == found[0][0]
        for got, one in zip(theirs, results, strict=True):
            assert got.loss == pytest.approx(one.loss, rel=1e-5)
            assert got.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
            assert got.max_logit == pytest.approx(one.max_logit, rel=1e-4)
            assert (got.num_tokens, got.clipped_heads) == (one.num_tokens, one.clipped_heads)
        for key, ((start, stop), grad, weight) in pieces.items():
            _, whole_grad, whole = held[key]
            scale = whole_grad.norm() + 1e-6
            assert (grad - whole_grad[start:stop]).norm() / scale < 2e-4, key
            assert (weight - whole[start:stop]).norm() / whole.norm().clamp(min=1) < 1e-4, key
        for key, bias in buffers.items():
            assert torch.equal(biases[key], found[0][2][key])
            torch.testing.assert_close(biases[key], bias, atol=2e-3, rtol=0)
        # root, three layers, the experts of two: once a step, or once a micro-batch of two.
        # a group of one process may have nothing to reduce
        times = 1 if parallel.zero == 1 else 2
        assert reductions in (4 * times, 6 * times)


def test_rows_are_held_once(recipe):
    parallel = ParallelRecipe(zero=3, expert=2)
    found = crew(4).run(train, dataclasses.replace(recipe, parallel=parallel))
    total = 0
    for name, (_, _, weight) in found[0][1].items():
        parts = [f[1][name] for f in found]
        kept = weight.shape == parts[-1][2].shape and parts[0][0] == parts[-1][0]
        rows = sorted(r for (start, stop), _, _ in parts for r in range(start, stop))
        assert kept or rows == list(range(len(rows))), name
        if ".experts." in name:
            assert [p[0] for p in parts] == [(0, 2), (4, 6), (2, 4), (6, 8)]
        total += kept * weight.numel()
    whole = sum(w.numel() for _, _, w in found[0][1].values())
    assert total < 0.1 * 4 * whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert": 3}, r"parallel.expert \(3\) must divide shard x context"),
        ({"shard": 3}, r"makes 3 processes, but there are 4"),
        ({"pipeline": 2}, r"parallel.pipeline \(2\) must be 1"),
    ],
)
def test_a_layout_that_cannot_work_is_refused_everywhere(recipe, change, message):
    parallel = ParallelRecipe(zero=1, **change)
    found = crew(4).run(refusal, dataclasses.replace(recipe, parallel=parallel))
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(found[0])
    assert found == [found[0]] * 4


def refusal(world, recipe):
    from openk3.train.setup import build_trainer
    from openk3.train.sources import open_data

    with pytest.raises(ConfigError) as caught:
        build_trainer(recipe, open_data(recipe), world)
    return str(caught.value)
