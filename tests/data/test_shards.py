"""Token shards: exact round trips, and every damage is refused by a message that names the file."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from data.helpers import EOT, make_dataset
from openk3._io import sha256_file
from openk3.data.dataset import Dataset
from openk3.data.shards import Shard, ShardWriter, shard_size, token_dtype
from openk3.data.writer import write_dataset
from openk3.errors import DataError, InputError, StorageError


@pytest.mark.parametrize("vocab_size", [65536, 65537])
def test_shard_round_trip(tmp_path: Path, vocab_size: int) -> None:
    dtype = token_dtype(vocab_size)
    documents = [np.array([vocab_size - 1]), np.array([1, 2, 3]), np.array([7, 0])]
    writer = ShardWriter(tmp_path / "a", dtype)
    for ids in documents:
        writer.add(ids)
    writer.close()
    shard = Shard(tmp_path / "a")
    assert (tmp_path / "a").stat().st_size == shard_size(6, 3, dtype)
    assert shard.tokens.dtype == dtype
    assert dtype.itemsize == (2 if vocab_size <= 65536 else 4)
    assert shard.tokens.tolist() == np.concatenate(documents).tolist()
    assert shard.ends.tolist() == [1, 4, 6]
    assert shard.document_starts(0, 6).tolist() == [0, 1, 4]
    assert shard.document_starts(1, 4).tolist() == [1]
    assert shard.document_starts(2, 2).tolist() == []


def test_the_file_format_is_fixed(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a", token_dtype(100))
    writer.add(np.array([5, 6, 7]))
    writer.close()
    header = b"K3TOKENS" + bytes([1, 0, 0, 0, 2, 0, 0, 0]) + bytes([3, *[0] * 7, 1, *[0] * 7])
    body = bytes([5, 0, 6, 0, 7, 0, 0, 0]) + bytes([3, *[0] * 7])
    assert (tmp_path / "a").read_bytes() == header + bytes(32) + body
    Shard(tmp_path / "a").verify(hashlib.sha256(header + bytes(32) + body).hexdigest())


def test_a_shard_whose_writer_died_is_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a", token_dtype(10))
    writer.add(np.ones(100, dtype=np.int64))
    writer.abandon()
    with pytest.raises(DataError, match="a is not a complete token shard"):
        Shard(tmp_path / "a")


def test_dataset_over_several_shards(tmp_path: Path) -> None:
    lengths = [3, 1, 5, 2, 9, 1, 1]
    data = make_dataset(tmp_path / "d", lengths, max_shard_tokens=8)
    split = data.split("train")
    stored = []
    token = 1
    for length in lengths:
        stored += [*range(token, token + length), EOT]
        token += length
    assert len(list((tmp_path / "d").glob("*.k3tok"))) > 2
    assert split.num_documents == 7
    assert split.num_tokens == len(stored)
    assert split.num_bytes == sum(1 + i % 3 for i in stored if i != EOT)
    starts = [0, *(i + 1 for i, t in enumerate(stored[:-1]) if t == EOT)]
    for low in range(len(stored) + 1):
        for high in range(low, len(stored) + 1):
            assert split.read(low, high).tolist() == stored[low:high]
            expected = [s for s in starts if low <= s < high]
            assert split.document_starts(low, high).tolist() == expected
    cuts = [*starts, len(stored)]
    for i in range(7):
        assert split.document(i).tolist() == stored[cuts[i] : cuts[i + 1]]


def test_ranges_outside_a_split_are_refused(tmp_path: Path) -> None:
    split = make_dataset(tmp_path / "d", [3]).split("train")
    with pytest.raises(InputError, match="outside split 'train' of 4"):
        split.read(0, 5)
    with pytest.raises(InputError, match="document 1 is outside"):
        split.document(1)
    with pytest.raises(DataError, match=r"no split 'test'; it has \['train'\]"):
        split.dataset.split("test")


def _shard_of(path: Path) -> Path:
    return next(path.glob("*.k3tok"))


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("keep", [0, 10, 64, 70, -1])
def test_truncated_shard_is_named_without_checksums(tmp_path: Path, keep: int) -> None:
    make_dataset(tmp_path / "d", [30])
    shard = _shard_of(tmp_path / "d")
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(DataError, match=shard.name):
        Dataset(tmp_path / "d", verify=False)


def test_every_flipped_byte_is_found_by_the_checksum(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d", [30])
    for name in ("train-00000.k3tok", "token_bytes.bin"):
        file = tmp_path / "d" / name
        for at in range(file.stat().st_size):
            _flip(file, at)
            with pytest.raises(DataError, match=name):
                Dataset(tmp_path / "d")
            _flip(file, at)
    Dataset(tmp_path / "d")


def test_checksums_are_optional(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d", [30])
    _flip(_shard_of(tmp_path / "d"), 70)
    assert Dataset(tmp_path / "d", verify=False).split("train").num_tokens == 31
    with pytest.raises(DataError, match="is corrupt: its sha256"):
        Dataset(tmp_path / "d", verify=True)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no index"):
        Dataset(tmp_path)
    make_dataset(tmp_path / "d", [3])
    (tmp_path / "d" / "token_bytes.bin").unlink()
    with pytest.raises(DataError, match=r"token_bytes\.bin is missing"):
        Dataset(tmp_path / "d")
    with pytest.raises(DataError, match=r"cannot read .*token_bytes\.bin"):
        Dataset(tmp_path / "d", verify=False)
    _shard_of(tmp_path / "d").unlink()
    with pytest.raises(DataError, match=r"cannot read token shard .*train-00000\.k3tok"):
        Dataset(tmp_path / "d", verify=False)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema", 2, "has schema 2, this version reads 1"),
        ("format", "other", "is not the index"),
        ("vocab_size", None, "is corrupt: TypeError"),
        ("vocab_size", 70000, "belongs to another dataset"),
        ("splits", {"train": {}}, "is corrupt: KeyError"),
        ("eot_id", 2, "does not end with the end-of-text id 2"),
        ("source", None, "is corrupt: TypeError"),
        ("source", {"skipped": 7}, "is corrupt: TypeError"),
        ("files", {"../../etc/passwd": ""}, "outside its folder"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    make_dataset(tmp_path / "d", [3])
    file = tmp_path / "d" / "index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(DataError, match=message):
        Dataset(tmp_path / "d")


def test_shards_of_another_build_are_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path / "one", [3])
    make_dataset(tmp_path / "two", [4])
    _shard_of(tmp_path / "one").write_bytes(_shard_of(tmp_path / "two").read_bytes())
    with pytest.raises(DataError, match=r"train-00000\.k3tok holds 5 tokens"):
        Dataset(tmp_path / "one", verify=False)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    lengths = np.array([0, 1, 1])
    with (
        pytest.raises(InputError, match="token id 3 is outside the vocabulary of 3"),
        write_dataset(tmp_path / "d", token_bytes=lengths, eot_id=0) as writer,
    ):
        list(map(writer.add, ["train", "train"], [[1, 2], [1, 3]]))
    with (
        pytest.raises(DataError, match="holds no text document"),
        write_dataset(tmp_path / "d", token_bytes=lengths, eot_id=0),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ShardWriter, ids: np.ndarray) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "add", refuse)
    with pytest.raises(StorageError, match="No space left"):
        make_dataset(tmp_path / "d", [3])
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    make_dataset(tmp_path / "d", [3])
    before = sha256_file(tmp_path / "d" / "index.json")
    with pytest.raises(DataError, match="exists already"):
        make_dataset(tmp_path / "d", [4])
    assert sha256_file(tmp_path / "d" / "index.json") == before


@pytest.mark.parametrize(
    ("lengths", "eot_id", "message"),
    [
        ([0, 70000], 0, "0 to 65535"),
        ([0, -1], 0, "0 to 65535"),
        ([0, 1], 1, "stands for 0 bytes"),
        ([0, 1], 2, "stands for 0 bytes"),
    ],
)
def test_bad_vocabularies_are_refused(
    tmp_path: Path, lengths: list[int], eot_id: int, message: str
) -> None:
    with (
        pytest.raises(InputError, match=message),
        write_dataset(tmp_path / "d", token_bytes=np.array(lengths), eot_id=eot_id),
    ):
        pass


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_dataset(tmp_path / name, [3, 4, 5], max_shard_tokens=5)
    one, two = (sorted((tmp_path / name).iterdir()) for name in ("one", "two"))
    assert [f.name for f in one] == [f.name for f in two]
    assert [f.read_bytes() for f in one] == [f.read_bytes() for f in two]
