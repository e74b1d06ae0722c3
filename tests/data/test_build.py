"""Building datasets: exact text, held-out documents, duplicates, refusals, determinism."""

from pathlib import Path

import numpy as np
import pytest

from data.helpers import source_files, write_files
from openk3.data import build as module
from openk3.data.baselines import texts
from openk3.data.build import HELD_OUT, TRAIN, build, name_hash, token_lengths
from openk3.data.dataset import Dataset
from openk3.data.rows import Windows
from openk3.data.sources import Files
from openk3.errors import ConfigError, DataError, InputError
from openk3.text.tokenizer import Tokenizer, load
from openk3.text.train_tokenizer import train

VOCAB = 300


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = source_files(40) | {
        "copy.py": source_files(40)["m3.py"],
        "unicode.txt": "naïve ☃ 😀\r\n\tend".encode(),
        "data.bin": bytes(100),
    }
    return write_files(tmp_path_factory.mktemp("corpus") / "src", files)


@pytest.fixture(scope="module")
def dataset(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    out = tmp_path_factory.mktemp("built") / "d"
    return build(Files([corpus]), out, vocab_size=VOCAB, held_out=0.2, note="from a test")


def _texts(dataset: Dataset, split: str) -> list[bytes]:
    assert dataset.tokenizer_path is not None
    return texts(dataset.split(split), load(dataset.tokenizer_path))


def test_every_document_is_stored_exactly_once(corpus: Path, dataset: Dataset) -> None:
    stored = _texts(dataset, TRAIN) + _texts(dataset, HELD_OUT)
    expected = {text for _, text in Files([corpus])}
    assert len(stored) == len(expected) == 41
    assert set(stored) == expected
    for split in dataset.splits.values():
        assert split.num_bytes == sum(map(len, _texts(dataset, split.name)))
        ends = split.read(0, split.num_tokens) == dataset.eot_id
        assert ends.sum() == split.num_documents
    assert dataset.source == {"note": "from a test", "skipped": {"binary": 1, "duplicate": 1}}


def test_held_out_documents_follow_their_names(corpus: Path, dataset: Dataset) -> None:
    by_text = {text: name for name, text in reversed(list(Files([corpus])))}
    for split, wanted in ((TRAIN, False), (HELD_OUT, True)):
        for text in _texts(dataset, split):
            assert (name_hash(by_text[text], "held out") < 0.2) is wanted
    assert 2 <= dataset.split(HELD_OUT).num_documents <= 16


def test_name_hash_is_uniform_and_fixed() -> None:
    values = np.array([name_hash(f"document {i}", "held out") for i in range(4000)])
    assert np.histogram(values, bins=4, range=(0, 1))[0].min() > 900
    assert name_hash("a", "held out") == pytest.approx(0.329987, abs=1e-6)
    assert name_hash("a", "held out") != name_hash("a", "tokenizer")


def test_token_lengths_give_bytes_of_any_piece(dataset: Dataset) -> None:
    assert dataset.tokenizer_path is not None
    tokenizer = load(dataset.tokenizer_path)
    assert np.array_equal(token_lengths(tokenizer), dataset.token_bytes)
    assert dataset.eot_id == tokenizer.eos_id
    assert dataset.vocab_size == VOCAB
    row = Windows(dataset.split(TRAIN), 37, seed=0).row(3)
    wanted = [t for t in row.targets.tolist() if not tokenizer.is_special(t)]
    assert row.num_bytes == len(tokenizer.decode_bytes(wanted))


def test_seen_text_is_what_rows_showed(dataset: Dataset) -> None:
    assert dataset.tokenizer_path is not None
    windows = Windows(dataset.split(TRAIN), 16, seed=1)
    seen = texts(dataset.split(TRAIN), load(dataset.tokenizer_path), windows.seen(10))
    assert sum(map(len, seen)) == sum(windows.row(i).num_bytes for i in range(10))
    whole = b"\n".join(_texts(dataset, TRAIN))
    assert all(piece in whole for piece in seen)


def test_the_same_corpus_gives_the_same_files(
    corpus: Path, dataset: Dataset, tmp_path: Path
) -> None:
    again = build(
        Files([corpus]), tmp_path / "d", vocab_size=VOCAB, held_out=0.2, note="from a test"
    )
    names = sorted(path.name for path in dataset.path.iterdir())
    assert names == sorted(path.name for path in again.path.iterdir())
    for name in names:
        assert (dataset.path / name).read_bytes() == (again.path / name).read_bytes(), name


def test_batches_and_shards_do_not_change_the_tokens(
    corpus: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", 500)
    assert dataset.tokenizer_path is not None
    tokenizer = load(dataset.tokenizer_path)
    out = tmp_path / "d"
    other = build(Files([corpus]), out, tokenizer=tokenizer, held_out=0.2, max_shard_tokens=100)
    assert len(list(out.glob("train-*.k3tok"))) > 3
    for name, split in dataset.splits.items():
        expected = split.read(0, split.num_tokens)
        assert np.array_equal(other.split(name).read(0, split.num_tokens), expected)


def test_a_large_corpus_trains_the_tokenizer_on_a_sample(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def record(documents: list[str], vocab_size: int) -> Tokenizer:
        taken.extend(documents)
        return train(taken, vocab_size)

    monkeypatch.setattr(module, "_TOKENIZER_BYTES", 2000)
    monkeypatch.setattr("openk3.text.train_tokenizer.train", record)
    dataset = build(Files([corpus]), tmp_path / "d", vocab_size=VOCAB, held_out=0.2)
    assert 0 < len(taken) < dataset.split(TRAIN).num_documents / 2
    assert not {text.encode() for text in taken} & set(_texts(dataset, HELD_OUT))


def test_no_document_is_held_out_on_request(corpus: Path, tmp_path: Path) -> None:
    dataset = build(Files([corpus]), tmp_path / "d", vocab_size=VOCAB, held_out=0)
    assert list(dataset.splits) == [TRAIN]


@pytest.mark.parametrize("held_out", [1e-9, 0.999999999])
def test_both_splits_have_a_document(tmp_path: Path, held_out: float) -> None:
    write_files(tmp_path / "src", source_files(2))
    dataset = build(Files([tmp_path / "src"]), tmp_path / "d", vocab_size=VOCAB, held_out=held_out)
    counts = {name: split.num_documents for name, split in dataset.splits.items()}
    assert counts == {TRAIN: 1, HELD_OUT: 1}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"holds no text document \(skipped: nothing\)"),
        ({"a.bin": b"\0", "b.bin": b"\xff"}, r"holds no text document \(skipped: 2 binary\)"),
        ({"a.txt": b"", "b.bin": b"\xff"}, r"\(skipped: 1 binary, 1 empty\)"),
        ({"a.txt": b"one document\n"}, "one document, so none can be held out; cut it"),
    ],
)
def test_unusable_corpora_are_refused(
    tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    (tmp_path / "src").mkdir()
    write_files(tmp_path / "src", files)
    with pytest.raises(DataError, match=message):
        build(Files([tmp_path / "src"]), tmp_path / "d", vocab_size=VOCAB)
    assert not (tmp_path / "d").exists()


def test_options_that_do_not_fit_are_refused(
    corpus: Path, dataset: Dataset, tmp_path: Path
) -> None:
    source = Files([corpus])
    with pytest.raises(ConfigError, match="either a tokenizer or a vocab_size"):
        build(source, tmp_path / "d")
    with pytest.raises(ConfigError, match="held_out is 1"):
        build(source, tmp_path / "d", vocab_size=VOCAB, held_out=1)
    with pytest.raises(DataError, match="exists already"):
        build(source, dataset.path, vocab_size=VOCAB)
    with pytest.raises(InputError, match=r"no special token '\[EOF\]' \(did you mean '\[EO"):
        build(source, tmp_path / "d", vocab_size=VOCAB, end_of_text="[EOF]")
    assert list(tmp_path.iterdir()) == []
