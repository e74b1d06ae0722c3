"""The arithmetic of layouts: every row has one holder, and what cannot work is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.config import preset
from openk3.config.recipe import ParallelRecipe
from openk3.errors import ConfigError
from openk3.parallel.layout import Layout, check, expert_spans, resolve, row_spans

SIZES = st.integers(1, 9)


def tile(spans, rows):
    """Whether the spans cover 0..rows without gap or overlap."""
    held = sorted(i for start, stop in spans for i in range(start, stop))
    return held == list(range(rows))


@given(st.integers(0, 40), SIZES)
def test_rows_are_tiled_in_order(rows, parts):
    spans = row_spans(rows, parts)
    assert len(spans) == parts
    assert tile(spans, rows)
    assert list(spans) == sorted(spans)


@given(SIZES, SIZES, st.integers(1, 4))
def test_experts_are_tiled_and_a_group_holds_a_contiguous_block(expert, expert_shard, per):
    layout = Layout(shard=expert * expert_shard, expert=expert)
    spans = expert_spans(expert * per, layout)
    assert tile(spans, expert * per)
    for place, (start, stop) in enumerate(spans):
        block = place % expert
        assert block * per <= start <= stop <= (block + 1) * per


def test_shard_takes_what_the_others_leave():
    layout = resolve(ParallelRecipe(zero=3, replicate=2, expert=4), 16)
    assert layout == Layout(replicate=2, shard=8, expert=4)
    assert (layout.state, layout.expert_shard, layout.data) == (8, 2, 16)
    assert layout.describe() == "replicate 2 x shard 8, expert 4"
    assert resolve(ParallelRecipe(), 1).describe() == "one process"


@pytest.mark.parametrize(
    ("axes", "size", "message"),
    [
        ({"shard": 3}, 4, r"shard 3 x .* makes 3 processes, but there are 4"),
        ({"replicate": 3}, 4, r"replicate 3 x shard 1 .* makes 3 processes, but there are 4"),
        ({"replicate": 8}, 4, r"replicate 8 .* makes 8 processes, but there are 4"),
        ({"expert": 3}, 4, r"parallel.expert \(3\) must divide shard x context \(4 x 1 = 4\)"),
        ({"replicate": 2, "expert": 4}, 4, r"parallel.expert \(4\) must divide .* \(2 x 1 = 2\)"),
    ],
)
def test_sizes_that_clash_are_named(axes, size, message):
    with pytest.raises(ConfigError, match=message):
        resolve(ParallelRecipe(zero=1, **axes), size)


@pytest.mark.parametrize(
    ("layout", "batch", "message"),
    [
        (Layout(shard=3, expert=3), 3, r"expert \(3\) must divide model.num_experts \(16\)"),
        (Layout(shard=32), 32, r"\(32\) processes would share 16 experts"),
        (Layout(tensor=3), 1, r"tensor \(3\) must divide model.num_attention_heads \(4\)"),
        (Layout(pipeline=6), 1, r"pipeline \(6\) exceeds model.num_hidden_layers \(5\)"),
        (Layout(replicate=2, shard=2), 6, r"batch_sequences \(6\) .* \(2 x 2 = 4\)"),
    ],
)
def test_what_the_model_and_the_batch_do_not_allow(layout, batch, message):
    with pytest.raises(ConfigError, match=message):
        check(layout, preset("nano"), batch_sequences=batch)


def test_what_works_passes():
    check(Layout(shard=4, expert=2), preset("nano"), batch_sequences=8)
