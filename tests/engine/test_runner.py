"""A runner over pages computes what the model computes over dense caches, however it is cut."""

import pytest
import torch

from openk3.engine.plan import Checkpoint, Chunk, Copy, StepPlan
from openk3.engine.runner import ModelRunner
from openk3.engine.types import EngineConfig, Request, SamplingParams
from openk3.errors import ConfigError
from small_models import lively_model

HASH, PAGE, PAGES = 8, 16, 64
GREEDY = SamplingParams(temperature=0, logprobs=3)


@pytest.fixture(scope="module")
def model():
    return lively_model(seed=3)


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def steps(request, monkeypatch):
    """Every test with steps as C++, where there is a compiler, and as Python."""
    if request.param == "plain":
        monkeypatch.setattr("openk3.engine.runner.native_passes", lambda *_: None)


def runner(model, **options):
    sizes = {"hash_block": HASH, "page_tokens": PAGE, "num_pages": PAGES, "max_running": 4}
    made = ModelRunner(model, EngineConfig(**sizes | options))
    made.memory.poison(range(PAGES))
    return made


class Sequence:
    """A request with pages of its own, advanced by hand."""

    def __init__(self, runner, prompt, slot=0, params=GREEDY):
        self.runner, self.slot, self.known = runner, slot, list(prompt)
        self.request = Request(f"r{slot}", tuple(prompt), params)
        groups = runner.geometry.kda_groups
        first = slot * (PAGES // 4)
        self.states = tuple(range(first, first + groups))
        self.free = list(range(first + groups, first + PAGES // 4))
        self.latents = []
        self.start = 0
        self.logprobs = []

    def chunk(self, count, *, drafts=(), checkpoints=()):
        ids = (*self.known[self.start : self.start + count], *drafts)
        while len(self.latents) * PAGE < self.start + len(ids):
            self.latents.append(self.free.pop(0))
        self.ids = ids
        return Chunk(
            self.request,
            self.slot,
            ids,
            self.start,
            tuple(self.latents),
            self.states,
            checkpoints,
            len(drafts),
            tuple(self.known[len(self.request.prompt_ids) :]),
            self.start + count == len(self.known),
        )

    def commit(self, chunk, result):
        assert result.error is None
        self.start += len(chunk.token_ids) - chunk.num_drafts + max(len(result.new_ids) - 1, 0)
        self.known += result.new_ids
        self.logprobs += result.logprobs or ()


def step(sequences, *chunks, **plan):
    results = sequences[0].runner.run(StepPlan(chunks, **plan))
    for sequence, chunk, result in zip(sequences, chunks, results, strict=True):
        sequence.commit(chunk, result)


def continued(first, at, pages, tail, slot):
    """A sequence that goes on behind `first`, from its checkpoint at a whole page; its copies."""
    second = Sequence(first.runner, [*first.known[:at], *tail], slot)
    second.start, second.latents = at, first.latents[: at // PAGE]
    return second, tuple(Copy(*pair) for pair in zip(pages, second.states, strict=True))


def checkpoint_pages(runner):
    return (40, 41, 42)[: runner.geometry.kda_groups]


@torch.no_grad()
def expected(model, prompt, count):
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=count, temperature=0, stop_ids=[])
    logp = model(ids.clone())[0].float().log_softmax(-1)
    own = logp[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return ids[0].tolist(), own[len(prompt) - 1 :].tolist()


def prompt_of(length, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 200, (length,), generator=rng).tolist()


def check(sequence, model, count):
    ids, logprobs = expected(model, list(sequence.request.prompt_ids), count)
    assert sequence.known[: len(ids)] == ids
    ours = [entry.chosen for entry in sequence.logprobs[:count]]
    torch.testing.assert_close(ours, logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("cut", [41, 1, 3, 16, 17, 40])
def test_chunks_and_steps_are_one_pass(model, cut):
    seq = Sequence(runner(model), prompt_of(41))
    while seq.start < 41:
        step([seq], seq.chunk(min(cut, 41 - seq.start)))
    for _ in range(11):
        step([seq], seq.chunk(1))
    check(seq, model, 12)


def test_a05_a_prefill_in_chunks_and_single_tokens_leave_one_state(model):
    """vllm#41292: the chunk path and the recurrent path held their states the other way round."""
    ends = []
    for cut in (60, 1):
        seq = Sequence(runner(model), prompt_of(180))
        while seq.start < 180:
            step([seq], seq.chunk(min(cut, 180 - seq.start)))
        for _ in range(39):
            step([seq], seq.chunk(1))
        ends.append((seq.known, [entry.chosen for entry in seq.logprobs]))
    assert ends[0][0] == ends[1][0]
    torch.testing.assert_close(ends[0][1], ends[1][1], atol=1e-4, rtol=0)


def test_rows_of_all_kinds_share_a_step(model):
    shared = runner(model)
    a, b, c = (Sequence(shared, prompt_of(n, n), i) for i, n in enumerate((5, 30, 2)))
    step([a], a.chunk(5))
    step([b, a], b.chunk(13), a.chunk(1))
    step([a, c, b], a.chunk(1), c.chunk(2), b.chunk(17))
    for _ in range(6):
        step([c, a, b], c.chunk(1), a.chunk(1), b.chunk(1))
    check(a, model, 9)
    check(b, model, 7)
    check(c, model, 7)


@pytest.mark.parametrize(("stop", "at"), [(24, 24), (24, 16), (29, 24), (29, 8)])
def test_a_checkpoint_continues_another_sequence(model, stop, at):
    """Taken at a chunk's end or inside of it, restored by a copy; the pages are shared."""
    shared = runner(model)
    first = Sequence(shared, prompt_of(40))
    pages = checkpoint_pages(shared)
    step([first], first.chunk(stop, checkpoints=(Checkpoint(at, pages),)))
    second = Sequence(shared, prompt_of(40)[:at] + prompt_of(9, 5), slot=1)
    second.start, whole = at, at // PAGE
    second.latents = first.latents[:whole]
    copies = [Copy(*pair) for pair in zip(pages, second.states, strict=True)]
    if at % PAGE:
        second.latents.append(second.free.pop(0))
        copies.append(Copy(first.latents[whole], second.latents[whole]))
    step([second], second.chunk(9), copies=tuple(copies))
    for _ in range(3):
        step([second], second.chunk(1))
    check(second, model, 4)


def test_a_decoding_row_leaves_checkpoints(model):
    shared = runner(model)
    first = Sequence(shared, prompt_of(14))
    step([first], first.chunk(14))
    pages = checkpoint_pages(shared)
    for _ in range(3):
        points = (Checkpoint(16, pages),) if first.start == 15 else ()
        step([first], first.chunk(1, checkpoints=points))
    second, copies = continued(first, 16, pages, [7, 8], slot=1)
    step([second], second.chunk(2), copies=copies)
    check(second, model, 1)


def test_drafts_never_change_the_output(model):
    """Right, half right and wrong drafts, beside a row without any, then none at all."""
    shared = runner(model, num_drafts=3)
    a, b = (Sequence(shared, prompt_of(n, n), i) for i, n in enumerate((12, 20)))
    truth = expected(model, prompt_of(12, 12), 24)[0]
    step([a, b], a.chunk(12), b.chunk(20))
    windows = ["right", "half", "wrong", "none", "right", "wrong", "right"]
    for kind in windows:
        here = len(a.known)
        right = truth[here : here + 3]
        drafts = {
            "right": right,
            "half": [right[0], right[1] ^ 1, right[2]],
            "wrong": [right[0] ^ 1, *right[1:]],
            "none": [],
        }[kind]
        step([a, b], a.chunk(1, drafts=drafts), b.chunk(1))
    check(a, model, len(a.known) - 12)
    check(b, model, 8)
    assert len(a.known) == 12 + 1 + (4 + 2 + 1 + 1 + 4 + 1 + 4)


def test_a_drafting_row_leaves_checkpoints_at_its_start(model):
    shared = runner(model, num_drafts=3)
    first = Sequence(shared, prompt_of(14))
    truth = expected(model, prompt_of(14), 12)[0]
    step([first], first.chunk(14))
    step([first], first.chunk(1, drafts=truth[15:16]))
    assert first.start == 16
    pages = checkpoint_pages(shared)
    drafts = truth[17:19]
    step([first], first.chunk(1, drafts=drafts, checkpoints=(Checkpoint(16, pages),)))
    second, copies = continued(first, 16, pages, [7, 8], slot=1)
    step([second], second.chunk(2), copies=copies)
    check(second, model, 1)


def test_a_drafting_row_leaves_a_checkpoint_at_its_end(model):
    shared = runner(model, num_drafts=3)
    first, other = Sequence(shared, prompt_of(13)), Sequence(shared, prompt_of(9, 4), 1)
    step([first, other], first.chunk(13), other.chunk(9))
    truth = expected(model, prompt_of(13), 12)[0]
    step([first], first.chunk(1, drafts=truth[14:15]))
    assert first.start == 15
    pages = checkpoint_pages(shared)
    checkpoints = (Checkpoint(16, pages),)
    step(
        [first, other],
        first.chunk(1, checkpoints=checkpoints),
        other.chunk(1, drafts=[1, 2, 3]),
    )
    step([first], first.chunk(1, drafts=truth[17:19]))
    check(first, model, 6)
    second, copies = continued(first, 16, pages, [7, 8], slot=2)
    step([second], second.chunk(2), copies=copies)
    check(second, model, 1)


def test_a_slot_starts_over_without_its_old_window(model):
    shared = runner(model, num_drafts=3)
    old = Sequence(shared, prompt_of(9, 1))
    step([old], old.chunk(9))
    step([old], old.chunk(1, drafts=[1, 2, 3]))
    shared.forget(0)
    new = Sequence(shared, prompt_of(12))
    step([new], new.chunk(12))
    step([new], new.chunk(1, drafts=[5]))
    step([new], new.chunk(1))
    check(new, model, 2)


def test_one_bad_request_does_not_harm_the_others(model):
    shared = runner(model)
    a, b = Sequence(shared, prompt_of(9)), Sequence(shared, prompt_of(9, 4), 1)
    step([a, b], a.chunk(9), b.chunk(9))
    shared.memory.poison(a.states)
    results = shared.run(StepPlan((a.chunk(1), b.chunk(1))))
    assert "not finite" in results[0].error
    ids, _ = expected(model, prompt_of(9, 4), 2)
    assert results[1].new_ids == (ids[-1],)


def test_drafts_of_a_layer_need_the_layer(model):
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        runner(model, num_drafts=2, draft="mtp")
    with pytest.raises(ConfigError, match="batch_invariant"):
        EngineConfig(num_drafts=2, draft="mtp", batch_invariant=True)
