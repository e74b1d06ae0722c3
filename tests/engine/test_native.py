"""Compiled passes beside plain ones: the same logits and memory, and plain ones where they must."""

import random
import threading

import pytest
import torch

from openk3.engine import Engine, EngineConfig, Request, SamplingParams, native
from openk3.engine.plan import UNKNOWN, Chunk, StepPlan
from openk3.engine.recordable import unfit
from openk3.engine.runner import ModelRunner
from openk3.errors import ConfigError
from openk3.model import cast
from openk3.ops.native import build
from small_models import lively_model

needs_compiler = pytest.mark.skipif(
    not build.available()[0], reason=f"compiled passes: {build.available()[1]}"
)
SIZES = {"hash_block": 8, "page_tokens": 16, "num_pages": 60, "max_running": 4}
GREEDY = SamplingParams(temperature=0, logprobs=0)


@pytest.fixture(scope="module")
def model():
    return lively_model(seed=3)


def runner(model, **options):
    made = ModelRunner(model, EngineConfig(**SIZES, **options))
    made.memory.poison(range(SIZES["num_pages"]))
    return made


def chunk(own, slot, ids, start, *, drafts=0, outputs=(), samples=True):
    groups = own.geometry.kda_groups
    states = tuple(range(slot * groups, (slot + 1) * groups))
    pages = tuple(20 + slot * 8 + i for i in range((start + len(ids) - 1) // 16 + 1))
    request = Request(f"r{slot}", (1,), GREEDY)
    return Chunk(request, slot, tuple(ids), start, pages, states, (), drafts, outputs, samples)


@needs_compiler
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_mixed_step_is_the_plain_step(model, drafts):
    """Prompts, rows with and without drafts, and a piece of a prompt that chooses nothing."""
    own, plain = (runner(model, compiled=c, num_drafts=drafts) for c in (None, False))
    assert own._native is not None
    assert plain._native is None
    rng = random.Random(0)
    ids = [rng.randrange(200) for _ in range(110)]
    steps = [
        [chunk(own, 0, ids[:21], 0), chunk(own, 1, ids[:3], 0)],
        [
            chunk(own, 0, ids[21 : 22 + drafts], 21, drafts=drafts, outputs=(1,)),
            chunk(own, 1, ids[3:4], 3, outputs=(1,)),
            chunk(own, 2, ids[:30], 0, samples=False),
        ],
        [chunk(own, 2, ids[30:47], 30), chunk(own, 1, ids[4:5], 4, outputs=(1, 2))],
        [chunk(own, 3, ids[:109], 0), chunk(own, 1, ids[5:6], 5, outputs=(1, 2, 3))],
    ]
    for plan in steps:
        taken = []
        run = own._native.run
        own._native.run = lambda *args, run=run, taken=taken: taken.append(run(*args)) or taken[-1]
        ours, theirs = own.run(StepPlan(tuple(plan))), plain.run(StepPlan(tuple(plan)))
        own._native.run = run
        assert len(taken) == 1
        for a, b in zip(ours, theirs, strict=True):
            assert a.new_ids == b.new_ids
            if a.logprobs:
                assert a.logprobs[0].chosen == pytest.approx(b.logprobs[0].chosen, abs=2e-5)
    for layer in own.memory.kda_layers:
        for x, y in zip(own.memory.states(layer), plain.memory.states(layer), strict=True):
            torch.testing.assert_close(x[:9], y[:9], atol=2e-5, rtol=1e-4, equal_nan=True)


@needs_compiler
def test_passes_that_are_plain(model, monkeypatch):
    """Too many tokens; or so many behind so many that the other form of attention is cheaper."""
    monkeypatch.setattr(native, "MAX_ROWS", 8)
    own = runner(model)
    takes = own._native.takes
    assert takes([chunk(own, 0, range(8), 0)])
    assert not takes([chunk(own, 0, range(8), 0), chunk(own, 1, (1,), 0)])
    assert len(own.run(StepPlan((chunk(own, 0, range(9), 0),)))[0].new_ids) == 1
    monkeypatch.undo()
    wide = runner(model)
    takes, wide._native._mla = wide._native.takes, (4, 128, 64, 128, 512)  # K3's widths
    assert takes([chunk(own, 0, range(100), 0)])
    assert takes([chunk(own, 0, range(20), 500_000)])
    assert not takes([chunk(own, 0, range(1000), 500_000)])
    assert not takes([chunk(own, 0, (UNKNOWN,), 3, outputs=(1,))])


def answer(engine, name):
    engine.add(Request(name, (5, 9, 2), SamplingParams(max_tokens=6, temperature=0)))
    ids = []
    while engine.busy:
        for output in engine.step():
            ids += output.new_ids
    return ids


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@needs_compiler
def test_plain_steps_until_the_compiler_is_done(model, monkeypatch, three_threads):
    done = threading.Event()
    compiler = threading.Thread(target=done.wait)
    compiler.start()
    monkeypatch.setattr(native, "build_later", lambda: compiler)
    engine = Engine(model, EngineConfig(**SIZES, compiled="later"))
    first = answer(engine, "a")
    assert engine.runner._native._recorder is None
    assert torch.get_num_threads() == 2
    done.set()
    compiler.join()
    assert answer(engine, "b") == first
    assert engine.runner._native._recorder is not None
    assert torch.get_num_threads() == 3
    assert answer(Engine(model, EngineConfig(**SIZES, compiled=False)), "c") == first


@needs_compiler
def test_a_compiler_that_fails_beside_other_work_leaves_plain_steps(model, monkeypatch, caplog):
    monkeypatch.setattr(native, "build_later", lambda: threading.Thread())
    engine = Engine(model, EngineConfig(**SIZES, compiled="later"))
    monkeypatch.setattr(build, "_failure", ["c++ does not compile the CPU kernels"])
    assert len(answer(engine, "a")) == 6
    assert engine.runner._native._recorder is None
    assert "steps run as Python from now on: c++ does not compile" in caplog.text


@needs_compiler
def test_new_weights_are_used_wherever_they_lie():
    model, other = lively_model(seed=3), lively_model(seed=4)
    engine = Engine(model, EngineConfig(**SIZES))
    first = answer(engine, "a")
    model.load_state_dict(other.state_dict())
    engine.new_weights("in place")
    second = answer(engine, "b")
    assert second == answer(Engine(other, EngineConfig(**SIZES, compiled=False)), "b")
    assert second != first
    third = lively_model(seed=3)
    model.load_state_dict(third.state_dict(), assign=True)
    engine.new_weights("elsewhere")
    assert answer(engine, "c") == first


@needs_compiler
def test_a_model_that_is_changed_is_recorded_again_or_runs_plain(caplog):
    """What plain steps would see at once: modules replaced, hooks, weights that lie apart."""
    model, other = lively_model(seed=3), lively_model(seed=4)
    engine = Engine(model, EngineConfig(**SIZES, prefix_cache=False))

    def agree(name):
        plain = Engine(model, EngineConfig(**SIZES, compiled=False))
        ours = answer(engine, name)
        assert ours == answer(plain, name)
        return ours

    seen = [agree("a")]
    model.layers[1].self_attn = other.layers[1].self_attn
    seen.append(agree("b"))
    assert engine.runner._native._recorder is not None
    handle = model.layers[2].self_attn.o_proj.register_forward_hook(lambda m, i, o: 3 * o)
    seen.append(agree("c"))
    assert engine.runner._native._recorder is None
    assert "steps run as Python from now on: Linear modules, or hooks" in caplog.text
    handle.remove()
    assert agree("d") == seen[1]
    assert engine.runner._native._recorder is not None
    apart = model.layers[0].self_attn.q_proj.weight
    apart.data = other.layers[0].self_attn.q_proj.weight.data.T.contiguous().T
    seen.append(agree("e"))
    assert engine.runner._native._recorder is None
    assert len(set(map(tuple, seen))) == len(seen)


def test_without_a_compiler_steps_are_plain_and_it_is_said(model, monkeypatch, caplog):
    expected = answer(Engine(model, EngineConfig(**SIZES, compiled=False)), "a")
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with caplog.at_level("INFO"):
        engine = Engine(model, EngineConfig(**SIZES))
    assert "steps run as Python, several times slower: no C++ compiler" in caplog.text
    assert answer(engine, "a") == expected
    with pytest.raises(ConfigError, match=r"compiled = true cannot be honoured: no C\+\+ comp"):
        Engine(model, EngineConfig(**SIZES, compiled=True))


@needs_compiler
def test_a_draft_layer_reads_the_hidden_states_of_compiled_steps():
    model = lively_model(seed=3, mtp=True)
    options = {**SIZES, "num_drafts": 2, "draft": "mtp"}
    plain, compiled = (
        Engine(model, EngineConfig(**options, compiled=form)) for form in (False, True)
    )
    assert answer(compiled, "a") == answer(plain, "a")
    assert compiled.runner._native is not None
    drafted = [engine.stats().drafted_tokens for engine in (plain, compiled)]
    assert drafted[0] == drafted[1] > 0


def test_a_build_that_fails_leaves_plain_steps(model, monkeypatch, caplog):
    def load():
        raise build.BackendError("the compiler fell over")

    monkeypatch.setattr("openk3.ops.native.program.load", load)
    monkeypatch.setattr(build, "available", lambda: (True, ""))
    with caplog.at_level("INFO"):
        engine = Engine(model, EngineConfig(**SIZES))
    assert "the compiler fell over" in caplog.text
    assert len(answer(engine, "a")) == 6


@needs_compiler
def test_what_the_recording_does_not_know_is_not_compiled(model):
    assert unfit(model) is None
    assert "bfloat16" in unfit(cast(lively_model(seed=3), torch.bfloat16))
    hooked = lively_model(seed=3)
    handle = hooked.layers[1].self_attn.o_proj.register_forward_hook(lambda *_: None)
    assert "hooks" in unfit(hooked)
    handle.remove()
    assert unfit(hooked) is None
    biased = lively_model(seed=3)
    biased.layers[0].self_attn.q_proj.bias = torch.nn.Parameter(torch.ones(128))
    assert "bias" in unfit(biased)
    apart = lively_model(seed=3)
    apart.lm_head.weight.data = apart.lm_head.weight.data.T.contiguous().T
    assert "one piece" in unfit(apart)

    class Adapted(torch.nn.Linear):
        pass

    hooked.layers[0].self_attn.q_proj.__class__ = Adapted
    assert "Adapted modules" in unfit(hooked)
    moved = lively_model(seed=3)
    moved.layers[1].block_sparse_moe.dispatcher = object()
    assert "lie elsewhere" in unfit(moved)
