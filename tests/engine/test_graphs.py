"""What a recorded step is fed: the same logits as the plain step, rows filled up and all (on a CPU
the recorded function is called instead of replayed; recording itself is tested on a GPU)."""

import pytest
import torch

from openk3.engine import batch, graphs
from openk3.engine.paged import PagedSequence
from openk3.engine.plan import Chunk, StepPlan
from openk3.engine.runner import ModelRunner
from openk3.engine.types import EngineConfig, Request, SamplingParams
from small_models import lively_model


@pytest.mark.parametrize("drafts", [0, 2])
def test_filled_up_rows_are_the_plain_rows(drafts):
    sizes = {"hash_block": 8, "page_tokens": 16, "num_pages": 40, "max_running": 4}
    runner = ModelRunner(lively_model(seed=3), EngineConfig(**sizes, num_drafts=drafts))
    groups = runner.geometry.kda_groups

    def chunk(slot, ids, start, outputs=()):
        request = Request(f"r{slot}", (1,), SamplingParams(temperature=0))
        pages, states = (30 + slot,), tuple(range(slot * groups, (slot + 1) * groups))
        guesses = max(len(ids) - 1, 0) if outputs else 0
        return Chunk(request, slot, ids, start, pages, states, (), guesses, outputs)

    runner.run(StepPlan(tuple(chunk(s, (5, 6 + s, 7), 0) for s in range(3))))
    extra = (11, 12)[:drafts]
    chunks = [chunk(s, (9, *extra[: s + 1]), 3, (9,)) for s in range(3)]
    rows = batch.decode_rows(chunks, runner.memory, {})
    before = runner.memory.pool.clone()
    plain = batch.build(rows, chunks, [], runner.memory, runner._pending)
    with torch.inference_mode():
        wanted = runner._forward(plain.input_ids, plain.sequence)[0]
        runner.memory.pool.copy_(before)
        recorder = graphs.DecodeGraphs(runner._forward, runner.memory, runner._pending)
        shape = graphs._Shape(graphs.num_rows(3), rows.tokens, graphs.table_width(1), groups)
        assert shape.rows == 4
        numbers = graphs._pack(rows, shape, runner.memory.scratch)
        ids, sequence = recorder._sequence(numbers, shape)
        assert isinstance(sequence, PagedSequence)
        got = runner._forward(ids, sequence)[0]
    torch.testing.assert_close(got[: len(wanted)], wanted, atol=1e-5, rtol=1e-5)
    assert bool(got.isfinite().all())


def test_sizes_of_graphs():
    assert [graphs.num_rows(n) for n in (1, 2, 3, 9, 16, 17, 200)] == [1, 2, 4, 16, 16, 32, 208]
    assert [graphs.table_width(n) for n in (1, 16, 17, 300)] == [16, 16, 64, 1024]
