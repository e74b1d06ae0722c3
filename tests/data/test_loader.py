"""Rows and batches: purity, conservation, the same data for any number of ranks, resume."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.helpers import EOT, make_dataset
from openk3.data.dataset import Dataset, Split
from openk3.data.loader import Batch, Loader, batches_in_order, collate
from openk3.data.mixture import Mixture, training_rows
from openk3.data.permute import Permutation
from openk3.data.rows import IGNORE, InOrder, Windows
from openk3.errors import ConfigError, DataError, InputError

LENGTHS = [3, 1, 5, 2, 40, 1, 1, 17, 4, 8]  # 82 tokens and 10 end-of-text tokens


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("data") / "d", LENGTHS, max_shard_tokens=20)


@pytest.fixture(scope="module")
def split(data: Dataset) -> Split:
    return data.split("train")


def _previous(split: Split) -> dict[int, int]:
    """For each id the one that must be read before it."""
    stored = split.read(0, split.num_tokens).tolist()
    pairs = zip([EOT, *stored[:-1]], stored, strict=True)
    return {after: before for before, after in pairs if after != EOT}


def _equal(one: Batch, two: Batch) -> bool:
    tensors = ("input_ids", "targets", "cu_seqlens")
    counts = ("num_tokens", "num_bytes")
    same = all(torch.equal(getattr(one, n), getattr(two, n)) for n in tensors)
    return same and all(getattr(one, n) == getattr(two, n) for n in counts)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**62))
@settings(max_examples=60, deadline=None)
def test_permutation_is_a_bijection(size: int, seed: int) -> None:
    permutation = Permutation(size, seed)
    assert sorted(permutation(i) for i in range(size)) == list(range(size))


def test_permutation_spreads_and_depends_on_the_seed() -> None:
    size, many = 10**12, 2000
    places = np.array([Permutation(size, 1)(i) for i in range(many)]) / size
    assert abs(places.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(places[1:], places[:-1])[0, 1]) < 0.08
    assert [Permutation(100, 1)(i) for i in range(9)] != [Permutation(100, 2)(i) for i in range(9)]
    with pytest.raises(InputError):
        Permutation(5, 0)(5)
    with pytest.raises(InputError):
        Permutation(0, 0)


@given(seq_len=st.integers(1, 120), seed=st.integers(0, 2**62), epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_every_token_once(split: Split, seq_len: int, seed: int, epoch: int) -> None:
    windows = Windows(split, seq_len, seed)
    rows = [windows.row(epoch * windows.num_rows + i) for i in range(windows.num_rows)]
    targets = Counter(np.concatenate([r.targets for r in rows]).tolist())
    assert targets == Counter(split.read(0, split.num_tokens).tolist())
    assert sum(r.num_bytes for r in rows) == split.num_bytes
    assert sum(len(r.inputs) for r in rows) == split.num_tokens
    assert sum(len(r.inputs) < seq_len for r in rows) <= 1


@given(seq_len=st.integers(1, 120), seed=st.integers(0, 2**62), index=st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_inputs_precede_targets_and_sequences_begin_at_documents(
    split: Split, seq_len: int, seed: int, index: int
) -> None:
    row = Windows(split, seq_len, seed).row(index)
    before = _previous(split)
    for given_id, wanted in zip(row.inputs.tolist(), row.targets.tolist(), strict=True):
        if wanted != EOT:
            assert given_id == before[wanted]
    # a sequence begins exactly where the input is an end-of-text token
    begins = [i for i, token in enumerate(row.inputs.tolist()) if token == EOT and i > 0]
    assert row.starts.tolist() == begins


@given(seq_len=st.integers(1, 50), seed=st.integers(0, 2**62), index=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_row_is_pure(split: Split, seq_len: int, seed: int, index: int) -> None:
    used = Windows(split, seq_len, seed)
    for other in (index + 1, 0, index * 2):
        used.row(other)
    one, two = used.row(index), Windows(split, seq_len, seed).row(index)
    assert np.array_equal(one.inputs, two.inputs)
    assert np.array_equal(one.targets, two.targets)
    assert np.array_equal(one.starts, two.starts)
    assert one.num_bytes == two.num_bytes


def test_epochs_and_seeds_differ(split: Split) -> None:
    windows = Windows(split, 8, seed=3)
    epochs = [
        [windows.row(e * windows.num_rows + i).targets.tolist() for i in range(windows.num_rows)]
        for e in range(3)
    ]
    assert epochs[0] != epochs[1] != epochs[2]
    assert {tuple(r) for r in epochs[0]} != {tuple(r) for r in epochs[1]}, "edges must move"
    assert Windows(split, 8, seed=4).row(0).targets.tolist() != epochs[0][0]


@given(num_rows=st.integers(0, 40), seed=st.integers(0, 2**62), seq_len=st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_seen_is_what_the_rows_held(split: Split, num_rows: int, seed: int, seq_len: int) -> None:
    windows = Windows(split, seq_len, seed)
    held = {t for i in range(num_rows) for t in windows.row(i).targets.tolist()} - {EOT}
    ranges = windows.seen(num_rows)
    seen = [t for low, high in ranges for t in split.read(low, high).tolist() if t != EOT]
    assert set(seen) == held
    assert len(seen) == len(held), "ranges must not overlap"
    assert ranges == sorted(ranges)


@given(
    batch_rows=st.integers(1, 4),
    world_size=st.integers(1, 6),
    steps=st.integers(1, 5),
    seed=st.integers(0, 2**62),
)
@settings(max_examples=40, deadline=None)
def test_any_number_of_ranks_takes_the_same_rows(
    split: Split, batch_rows: int, world_size: int, steps: int, seed: int
) -> None:
    windows = Windows(split, 8, seed)
    alone = Loader(windows, batch_rows * world_size)
    ranks = [Loader(windows, batch_rows, rank=r, world_size=world_size) for r in range(world_size)]
    for _ in range(steps):
        whole = next(alone)
        parts = [next(loader) for loader in ranks]
        for rank, part in enumerate(parts):
            assert torch.equal(part.targets, whole.targets[rank::world_size])
            assert torch.equal(part.input_ids, whole.input_ids[rank::world_size])
        assert sum(p.num_tokens for p in parts) == whole.num_tokens
        assert sum(p.num_bytes for p in parts) == whole.num_bytes
        assert {loader.position for loader in ranks} == {alone.position}


@given(taken=st.integers(0, 30), more=st.integers(1, 10), seed=st.integers(0, 2**62))
@settings(max_examples=40, deadline=None)
def test_resume_is_an_integer(split: Split, taken: int, more: int, seed: int) -> None:
    running = Loader(Windows(split, 8, seed), 3, rank=1, world_size=2)
    for _ in range(taken):
        next(running)
    resumed = Loader(Windows(split, 8, seed), 3, rank=1, world_size=2, position=running.position)
    assert all(_equal(next(running), next(resumed)) for _ in range(more))


def test_resume_with_another_number_of_ranks_goes_on_with_the_next_rows(split: Split) -> None:
    windows = Windows(split, 8, seed=5)
    loader = Loader(windows, 2, rank=0, world_size=3)
    next(loader)
    resumed = [Loader(windows, 3, rank=r, world_size=2, position=loader.position) for r in (0, 1)]
    taken = torch.stack([next(r).targets for r in resumed], dim=1).view(-1, 8)
    for i, row in enumerate(taken):
        expected = windows.row(6 + i).targets
        assert row[: len(expected)].tolist() == expected.tolist()


def test_batch_layout(split: Split) -> None:
    rows = InOrder(split, 8)
    batch = collate([rows.row(0), rows.row(rows.num_rows - 1), rows.row(rows.num_rows)], 8, EOT)
    stored = split.read(0, 92).tolist()
    assert batch.input_ids.tolist() == [
        [EOT, *stored[:7]],
        [*stored[87:91], EOT, EOT, EOT, EOT],
        [EOT] * 8,
    ]
    assert batch.targets.tolist() == [
        stored[:8],
        [*stored[88:92], *[IGNORE] * 4],
        [IGNORE] * 8,
    ]
    # row 0 reads "0 | 1 2 3 0 | 4 0 | 5", row 1 ends after 4 tokens, row 2 is padding
    assert stored[:8] == [1, 2, 3, EOT, 4, EOT, 5, 6]
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 8, 12, 16, 24]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.input_ids.dtype == batch.targets.dtype == torch.int64
    assert batch.num_tokens == 12
    assert batch.num_bytes == sum(1 + t % 3 for t in stored[:8] + stored[88:] if t != EOT)
    assert _equal(batch.to("cpu"), batch)
    packed = batch.packed()
    assert packed.input_ids.shape == packed.targets.shape == (1, 24)
    assert packed.input_ids[0].tolist() == batch.input_ids.flatten().tolist()
    assert packed.targets[0].tolist() == batch.targets.flatten().tolist()


@given(
    seq_len=st.integers(1, 120),
    context=st.integers(0, 119),
    batch_rows=st.integers(1, 3),
    world_size=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_evaluation_has_every_token_once(
    split: Split, seq_len: int, context: int, batch_rows: int, world_size: int
) -> None:
    context = min(context, seq_len - 1)
    ranks = [
        list(
            batches_in_order(
                InOrder(split, seq_len, context), batch_rows, rank=r, world_size=world_size
            )
        )
        for r in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    flat = [batch for batches in ranks for batch in batches]
    wanted = torch.cat([batch.targets.flatten() for batch in flat])
    counted = Counter(wanted[wanted != IGNORE].tolist())
    assert counted == Counter(split.read(0, split.num_tokens).tolist())
    assert sum(batch.num_bytes for batch in flat) == split.num_bytes
    assert sum(batch.num_tokens for batch in flat) == split.num_tokens


def test_context_rows_repeat_the_tokens_before(split: Split) -> None:
    rows = InOrder(split, 10, num_context=4)
    stored = [EOT, *split.read(0, split.num_tokens).tolist()]
    second = rows.row(1)
    assert second.inputs.tolist() == stored[6:16]
    assert second.targets.tolist() == [*[IGNORE] * 4, *stored[11:17]]


def _numbers(tmp_path: Path, name: str, count: int) -> Windows:
    return Windows(make_dataset(tmp_path / name, [count]).split("train"), 4, seed=1)


def test_mixture_is_exact_and_conserves_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [30, 30, 30]
    parts = [
        Windows(make_dataset(tmp_path / str(i), lengths).split("train"), 4, seed=i)
        for i in range(3)
    ]
    mixture = Mixture(parts, [5, 3, 2], seed=9)
    assert mixture.shares == [5000, 3000, 2000]
    calls: list[tuple[int, int]] = []
    for which, part in enumerate(parts):
        monkeypatch.setattr(part, "row", lambda index, which=which: calls.append((which, index)))
    for i in range(2 * Mixture.BLOCK):
        mixture.row(i)
    for which, share in enumerate(mixture.shares):
        first = [i for w, i in calls[: Mixture.BLOCK] if w == which]
        second = [i for w, i in calls[Mixture.BLOCK :] if w == which]
        assert sorted(first) == list(range(share))
        assert sorted(second) == list(range(share, 2 * share))
    head = Counter(w for w, _ in calls[:500])
    assert abs(head[0] - 250) < 60, "sources must be mixed within a block"


def test_mixture_is_pure(tmp_path: Path) -> None:
    parts = [_numbers(tmp_path, "a", 50), _numbers(tmp_path, "b", 50)]
    one, two = Mixture(parts, [0.7, 0.3], seed=1), Mixture(parts, [0.7, 0.3], seed=1)
    forward = [one.row(i).targets.tolist() for i in range(40)]
    backward = [two.row(i).targets.tolist() for i in reversed(range(40))]
    assert forward == backward[::-1]
    assert forward != [
        Mixture(parts, [0.7, 0.3], seed=2).row(i).targets.tolist() for i in range(40)
    ]


def test_mixture_shares_add_up() -> None:
    from openk3.data.mixture import _shares

    assert _shares([1, 1, 1], 10) == [4, 3, 3]
    assert sum(_shares([0.123, 0.456, 7.89], 10_000)) == 10_000
    with pytest.raises(ConfigError, match="at least 1/10 "):
        _shares([1, 100], 10)
    with pytest.raises(ConfigError, match="positive"):
        _shares([1, 0], 10)
    with pytest.raises(ConfigError, match="positive"):
        _shares([1, float("nan")], 10)


def test_training_rows_mixes_by_size_or_weight(tmp_path: Path) -> None:
    one = make_dataset(tmp_path / "one", [60]).split("train")
    two = make_dataset(tmp_path / "two", [60]).split("train")
    mixture = training_rows([one, two], 4, seed=0)
    assert isinstance(mixture, Mixture)
    assert mixture.shares == [5000, 5000]
    weighted = training_rows([one, two], 4, seed=0, weights=[3, 1])
    assert isinstance(weighted, Mixture)
    assert weighted.shares == [7500, 2500]
    assert isinstance(training_rows([one], 4, seed=0), Windows)
    rows = [source.row(0).targets.tolist() for source in mixture.sources]
    assert rows[0] != rows[1], "sources must not be shuffled alike"
    with pytest.raises(ConfigError, match="at least one dataset"):
        training_rows([], 4, seed=0)
    with pytest.raises(ConfigError, match="2 sources but 3 weights"):
        training_rows([one, two], 4, seed=0, weights=[1, 1, 1])


def test_sources_that_cannot_be_mixed(tmp_path: Path, split: Split) -> None:
    with pytest.raises(DataError, match="different tokenizers"):
        Mixture([Windows(split, 4, 0), _numbers(tmp_path, "a", 50)], [1, 1], seed=0)
    with pytest.raises(ConfigError, match="seq_len differ: 4 and 5"):
        Mixture([Windows(split, 4, 0), Windows(split, 5, 0)], [1, 1], seed=0)
    with pytest.raises(ConfigError, match="2 weights"):
        Mixture([Windows(split, 4, 0)], [1, 1], seed=0)


def test_bad_arguments_are_named(split: Split) -> None:
    windows = Windows(split, 4, 0)
    with pytest.raises(ConfigError, match="rank 2 is outside a world of 2"):
        Loader(windows, 1, rank=2, world_size=2)
    with pytest.raises(ConfigError, match="batch_rows is 0"):
        Loader(windows, 0)
    with pytest.raises(ConfigError, match="position is -1"):
        Loader(windows, 1, position=-1)
    with pytest.raises(ConfigError, match="seq_len is 0"):
        Windows(split, 0, 0)
    with pytest.raises(ConfigError, match="num_context is 4"):
        InOrder(split, 4, num_context=4)
    with pytest.raises(InputError, match="must not be negative"):
        windows.row(-1)


def test_ids_beyond_the_vocabulary_are_refused_when_read(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d", [30])
    shard = tmp_path / "d" / "train-00000.k3tok"
    raw = bytearray(shard.read_bytes())
    raw[64 + 2 * 5 : 64 + 2 * 6] = (31).to_bytes(2, "little")  # ids 0 to 30 are the vocabulary
    shard.write_bytes(raw)
    rows = Windows(Dataset(tmp_path / "d", verify=False).split("train"), 31, seed=0)
    with pytest.raises(DataError, match=r"holds the id 31 .* beyond its vocabulary of 31"):
        rows.row(0)
