"""Log-probabilities of a prompt's own tokens: those of one pass, however the prompt is cut."""

import pytest
import torch

from engine_driver import Driver, H, P, random_ids
from openk3.engine import Engine, EngineConfig, Request, SamplingParams
from openk3.engine.types import Media
from openk3.errors import InputError
from small_models import lively_model

KINDS = {
    "roomy": {},
    "small chunks": {"max_batch_tokens": 7},
    "plain steps": {"compiled": False},
    "token by token": {"batch_invariant": True},
    "drafts": {"num_drafts": 2, "draft": "mtp"},
    "a step ahead": {"overlap": True},
}


@pytest.fixture(scope="module")
def model():
    return lively_model(seed=3, mtp=True)


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_one_pass(model, kind):
    sizes = {"hash_block": 8, "page_tokens": 32, "num_pages": 100, "debug": True}
    engine = Engine(model, EngineConfig(**sizes, **KINDS[kind]))
    prompts = [tuple(range(3, 3 + n)) for n in (1, 2, 33, 33, 60)]
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=5, temperature=0, prompt_logprobs=i, ignore_eos=True)
        engine.add(Request(f"r{i}", prompt, params))
    outputs = {}
    while engine.busy:
        for output in engine.step():
            assert output.cached_tokens == 0
            if output.request_id not in outputs:
                outputs[output.request_id] = output
            else:
                assert output.prompt_logprobs is None
    for i, prompt in enumerate(prompts):
        found = outputs[f"r{i}"].prompt_logprobs
        with torch.no_grad():
            logp = model(torch.tensor([prompt]))[0].log_softmax(-1)
        assert len(found) == len(prompt) - 1
        for at, one in enumerate(found):
            assert one.chosen == pytest.approx(float(logp[at, prompt[at + 1]]), abs=1e-4)
            values = logp[at].topk(i).values.tolist()
            assert [value for _, value in one.top] == pytest.approx(values, abs=1e-4)


def scores_of(served):
    found = [o.prompt_logprobs for o in served.outputs if o.prompt_logprobs is not None]
    assert len(found) == 1
    return [one.chosen for one in found[0]]


@pytest.mark.parametrize("budget", [5, 64, 1000])
def test_a_preempted_prompt_is_told_once_and_whole(budget):
    driver = Driver(max_batch_tokens=budget)
    prompt = random_ids(3 * P + 5)
    plain = driver.run(prompt)
    wanted = [-0.01 * token for token in prompt[1:]]
    served = driver.add(prompt, 9, prompt_logprobs=0)
    for count in (1, 3, 2, 8):
        for _ in range(count):
            driver.step()
        for seq in list(driver.engine.scheduler.running):
            driver.engine.scheduler.preempt(seq)
    driver.drain()
    assert scores_of(served) == wanted
    assert (plain.cached, served.cached, len(served.ids)) == (0, 0, 9)
    # what it has left behind serves others, and what they left does not serve it
    assert driver.run(prompt).cached == (len(prompt) - 1) // H * H
    again = driver.run(prompt, prompt_logprobs=0)
    assert (again.cached, scores_of(again)) == (0, wanted)
    driver.assert_idle()


def test_pictures_have_no_probabilities():
    driver = Driver()
    with pytest.raises(InputError, match="without pictures"):
        driver.add((driver.runner.media_id, 5), prompt_logprobs=0, media=Media(None, None, (b"a",)))
    with pytest.raises(InputError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=65)
