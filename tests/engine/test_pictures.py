"""Pictures in a request's prompt: chunks of any size see them as one pass does."""

import pytest
import torch

from openk3.engine.plan import Chunk, StepPlan
from openk3.engine.runner import ModelRunner
from openk3.engine.types import EngineConfig, Media, Request, SamplingParams
from openk3.errors import InputError
from small_models import seeing_model

GRIDS = torch.tensor([[1, 4, 2], [3, 2, 6]])  # 2 and 3 rows


@pytest.fixture(scope="module")
def runner():
    return ModelRunner(seeing_model(), EngineConfig(hash_block=8, page_tokens=16, num_pages=16))


def make_request(runner, ids):
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randn(int(GRIDS.prod(1).sum()), 3, 4, 4, generator=rng)
    media = Media(pixels, GRIDS, (b"a", b"b"))
    return Request("r", tuple(ids), SamplingParams(temperature=0, logprobs=0), media=media)


@pytest.mark.parametrize("cut", [20, 1, 2, 3, 5])
def test_chunks_see_pictures_as_one_pass_does(runner, cut):
    config = runner.model.config
    media, pad = config.media_placeholder_token_id, config.pad_token_id
    request = make_request(runner, [5, media, pad, 6, media, 7, 8])
    prompt = runner.expand(request)
    assert prompt.ids == (5, media, media, pad, 6, *[media] * 3, 7, 8)
    assert prompt.media == ((1, 2), (5, 3))
    states = tuple(range(runner.geometry.kda_groups))
    runner.forget(0)
    known, result = list(prompt.ids), None
    for start in range(0, len(known), cut):
        ids = tuple(known[start : start + cut])
        last = start + cut >= len(known)
        chunk = Chunk(request, 0, ids, start, (10,), states, samples=last)
        (result,) = runner.run(StepPlan((chunk,)))
    with torch.no_grad():
        logits = runner.model(
            torch.tensor([request.prompt_ids]),
            pixel_values=request.media.pixel_values,
            grid_thws=GRIDS,
            logits_for="last",
        )[0, 0]
    assert result.new_ids == (int(logits.argmax()),)
    wanted = float(logits.log_softmax(-1).max())
    assert result.logprobs[0].chosen == pytest.approx(wanted, abs=2e-5)


def test_misfits_are_refused(runner):
    media = runner.model.config.media_placeholder_token_id
    with pytest.raises(InputError, match="1 media ids for 2 items"):
        runner.expand(make_request(runner, [5, media, 6]))
