"""Random requests, aborts and weights over a small pool; the scripted runner checks every read."""

import random

import pytest

from openk3.engine import Engine, EngineConfig, Request, SamplingParams
from openk3.engine.scripted import ScriptedRunner, from_prefix
from openk3.engine.types import Stats


def serve(seed: int, num_pages: int, num_drafts: int, num_host_pages: int, total: int) -> Stats:
    """Serve `total` requests; check what each got and that nothing is left."""
    rng = random.Random(seed)
    runner = ScriptedRunner(
        from_prefix(17), page_tokens=16, num_pages=num_pages, vocab_size=32, end_id=31
    )
    config = EngineConfig(
        hash_block=4,
        max_batch_tokens=24,
        max_running=8,
        num_drafts=num_drafts,
        host_bytes=num_host_pages,
        debug=True,
    )
    engine = Engine(runner, config)
    bases = [tuple(rng.randrange(17) for _ in range(60)) for _ in range(4)]
    requests: dict[str, Request] = {}
    got: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    while len(requests) < total or engine.busy:
        while len(requests) < total and rng.random() < 0.4:
            own = tuple(rng.randrange(17) for _ in range(rng.randrange(20)))
            request = Request(
                str(len(requests)),
                rng.choice(bases)[: rng.randrange(1, 60)] + own,
                SamplingParams(max_tokens=rng.randrange(1, 40)),
                salt=rng.choice(["", "", "a"]),
            )
            engine.add(request)
            requests[request.id] = request
            got[request.id] = []
        if rng.random() < 0.1:
            engine.abort(str(len(requests) - rng.randrange(10)))
        if rng.random() < 0.01:
            runner.version = str(rng.random())
            engine.new_weights(runner.version)
        for output in engine.step():
            assert output.request_id not in ends
            got[output.request_id] += output.new_ids
            if output.finish_reason:
                ends[output.request_id] = output.finish_reason
    assert ends.keys() == requests.keys()
    for name, request in requests.items():
        ids = list(request.prompt_ids)
        for token in got[name]:
            assert token == runner.script(request, ids)
            ids.append(token)
        if ends[name] != "abort":
            assert len(got[name]) == request.params.max_tokens
    return engine.stats()


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("num_host_pages", [0, 12])
@pytest.mark.parametrize("num_pages", [12, 30, 200])
def test_a_thousand_requests_leave_nothing_behind(num_pages, num_host_pages, num_drafts):
    stats = serve(num_pages + num_drafts, num_pages, num_drafts, num_host_pages, total=60)
    assert stats.free_pages == stats.pages
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.finished + stats.aborted == 60
    assert stats.aborted > 0
    assert stats.cached_tokens > 0 or num_pages < 200
    assert (stats.accepted_tokens > 0) == (num_drafts > 0)
