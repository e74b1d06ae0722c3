"""A preempted request is computed again in chunks that are no larger than a window of drafts."""

from openk3.config import preset
from openk3.engine import Engine, EngineConfig, Request, SamplingParams
from openk3.model import K3


def test_small_chunks_of_a_resumed_request_are_no_windows():
    model = K3(preset("nano", initializer_range=0.1), seed=3).eval()
    sizes = {"hash_block": 8, "page_tokens": 16, "num_pages": 64, "max_batch_tokens": 3}
    answers = []
    for drafts in (0, 3):
        engine = Engine(model, EngineConfig(**sizes, num_drafts=drafts, debug=True))
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        engine.add(Request("a", tuple(range(3, 13)), params))
        ids: list[int] = []
        while engine.busy:
            for output in engine.step():
                ids += output.new_ids
            if drafts and len(ids) == 5 and not engine.stats().preemptions:
                engine.scheduler.preempt(engine.scheduler.running[0])
                engine.reset()
        answers.append(ids)
        assert engine.stats().preemptions == (1 if drafts else 0)
    assert answers[0] == answers[1]
