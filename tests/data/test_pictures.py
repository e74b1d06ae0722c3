"""Documents with pictures: stored once, read back as rows, refused by name when damaged."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from data.helpers import make_dataset
from openk3.config import VisionConfig, preset
from openk3.data.build_pictures import build_pictures, read_records
from openk3.data.dataset import Dataset
from openk3.data.loader import Loader, batches_in_order, collate
from openk3.data.mixture import training_rows
from openk3.data.pictures import PictureRows, PictureSplit, check_model, has_pictures
from openk3.data.rows import IGNORE
from openk3.errors import ConfigError, DataError, InputError
from openk3.text.image import ImageProcessor, image_prompt
from openk3.text.tokenizer import load as load_tokenizer

PROCESSOR = ImageProcessor(patch_size=4)
SIZES = [(8, 8), (12, 16), (7, 9), (30, 8)]
PLACE = "<|kimi_image_placeholder|>"
LINES = [
    {"image": "0.png", "text": "a cat"},
    {"images": ["1.png", "2.png"], "text": f"first {PLACE} then {PLACE}."},
    {"images": [], "text": "no picture at all"},
    {"image": "3.png", "text": ""},
]


def write_records(folder, lines=LINES):
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for i, (width, height) in enumerate(SIZES):
        pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def build(folder, lines=LINES, *, held_out=0.0, **options):
    records = read_records(write_records(folder, lines))
    options = {"vocab_size": 300} | options
    return build_pictures(
        records, folder / "out", processor=PROCESSOR, held_out=held_out, **options
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return build(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def pictures(dataset):
    return PictureSplit(dataset.split("train"))


def test_stored_documents(dataset, pictures):
    tokenizer = load_tokenizer(dataset.path)
    assert has_pictures(dataset)
    tokens, patches = pictures.document(1)
    text = tokenizer.decode(tokens.tolist())
    assert text == f"first {image_prompt(12, 16)} then {image_prompt(7, 9)}.[EOS]"
    images = [dataset.path.parent / f"{i}.png" for i in (1, 2)]
    expected = PROCESSOR(images)
    assert np.array_equal(patches.values, expected.pixel_values)
    assert np.array_equal(patches.grids, expected.grid_thws)
    assert pictures.document(2)[1].values.shape == (0, 3, 4, 4)
    rows = [1, 2 * 2 + 2 * 1, 0, 4]
    items = [1, 2, 0, 1]
    lengths = [len(pictures.document(i)[0]) + rows[i] - items[i] for i in range(4)]
    assert pictures.lengths.tolist() == lengths


def test_rows_are_whole_documents(dataset, pictures):
    rows = PictureRows(pictures, 80, None)
    row = rows.row(1)
    begin, pad, end = pictures.media_ids
    assert (row.inputs == pad).sum() == 6
    predicted = row.targets[:-1] != IGNORE
    assert np.array_equal(row.targets[:-1][predicted], row.inputs[1:][predicted])
    wanted = row.targets[row.targets != IGNORE].tolist()
    tokenizer = load_tokenizer(dataset.path)
    # all but the first token (nothing comes before it) and the pictures' prompts
    assert tokenizer.decode(wanted) == "first  then .[EOS]".removeprefix(
        tokenizer.decode([int(row.inputs[0])])
    )
    assert row.num_bytes == len(tokenizer.decode(wanted)) - len("[EOS]")
    assert not {begin, pad, end} & set(wanted)
    caption = rows.row(0)
    first = caption.inputs.tolist().index(end)  # the caption is predicted from its end on
    assert set(caption.targets[:first].tolist()) == {IGNORE}
    assert tokenizer.decode(caption.targets[first:].tolist()) == "a cat[EOS]"


def test_an_epoch_holds_every_document_once(pictures):
    rows = PictureRows(pictures, 80, 3)
    epochs = [[rows.row(e * 4 + i).inputs.tobytes() for i in range(4)] for e in range(4)]
    assert all(set(epoch) == set(epochs[0]) and len(set(epoch)) == 4 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert rows.row(5).inputs.tobytes() == PictureRows(pictures, 80, 3).row(5).inputs.tobytes()
    with pytest.raises(InputError, match="negative"):
        rows.row(-1)


def test_evaluation_takes_each_document_once_on_every_rank(pictures):
    rows = PictureRows(pictures, 80, None)
    found = []
    for rank in range(3):
        batches = list(batches_in_order(rows, 1, rank=rank, world_size=3))
        assert len(batches) == 2
        found += batches
    counts = [b.num_tokens for b in found]
    assert sum(counts) == sum(int((rows.row(i).targets != IGNORE).sum()) for i in range(4))
    assert counts.count(0) == 2
    assert sum(b.grid_thws is None for b in found) == 3  # two past the end, one of text alone


def test_batches(pictures):
    batch = next(Loader(PictureRows(pictures, 80, 0), 4))
    assert batch.input_ids.shape == (4, 80)
    assert batch.whole_rows
    assert batch.grid_thws.shape == (4, 3)
    assert batch.pixel_values.shape == (int(batch.grid_thws.prod(1).sum()), 3, 4, 4)
    assert batch.pixel_values.dtype == torch.float32
    assert (batch.input_ids == pictures.media_ids[1]).sum() == 11
    assert sorted(batch.valid.sum(1).tolist()) == sorted(n - 1 for n in pictures.lengths.tolist())
    assert batch.valid[:, 0].all()
    assert bool((batch.input_ids[~batch.valid] == pictures.dataset.eot_id).all())
    packed = batch.packed()
    assert packed.valid.shape == packed.input_ids.shape == (1, 320)
    assert packed.grid_thws is batch.grid_thws
    moved = batch.to("cpu")
    assert torch.equal(moved.pixel_values, batch.pixel_values)


def test_text_and_pictures_mix(dataset, pictures, tmp_path):
    text = make_dataset(tmp_path / "text", [40, 50])
    for name in ("vocab_size", "eot_id", "tokenizer_sha256"):
        setattr(text, name, getattr(dataset, name))
    mixed = training_rows([pictures.split, text.split("train")], 80, seed=0, weights=[1, 1])
    rows = [mixed.row(i) for i in range(40)]
    kinds = {row.patches is not None for row in rows}
    assert kinds == {True, False}
    batch = collate(rows, 80, dataset.eot_id)
    assert batch.grid_thws.shape[0] == sum(
        len(row.patches.grids) for row in rows if row.patches is not None
    )
    assert not batch.whole_rows


def test_a_record_keeps_its_split_when_others_come(tmp_path):
    lines = [{"image": f"{i % 4}.png", "text": f"number {i}"} for i in range(40)]
    held_out = []
    for count, name in ((25, "few"), (40, "all")):
        (tmp_path / name).mkdir()
        dataset = build(tmp_path / name, lines[:count], held_out=0.4)
        tokenizer, split = load_tokenizer(dataset.path), dataset.splits["heldout"]
        texts = [tokenizer.decode(split.document(i).tolist()) for i in range(split.num_documents)]
        held_out.append([text.split("<|media_end|>")[1] for text in texts])
        assert split.num_documents + dataset.splits["train"].num_documents == count
    assert 8 < len(held_out[1]) < 24
    assert held_out[0] == held_out[1][: len(held_out[0])]


class TestRefusals:
    def test_a_document_longer_than_a_row(self, pictures):
        with pytest.raises(ConfigError, match=r"takes \d+ positions, more than data.sequence_tok"):
            PictureRows(pictures, 20, 0)

    def test_a_bad_picture_leaves_nothing(self, tmp_path):
        path = write_records(tmp_path)
        (tmp_path / "2.png").write_bytes(b"\x89PNG\r\n\x1a\nnonsense")
        with pytest.raises(DataError, match=r"2\.png is"):
            build_pictures(
                read_records(path),
                tmp_path / "out",
                processor=PROCESSOR,
                vocab_size=300,
                held_out=0,
            )
        assert not (tmp_path / "out").exists()
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]

    @pytest.mark.parametrize(
        ("line", "match"),
        [
            ("{oops", "line 1: not valid JSON"),
            ('["a"]', "line 1: a record is"),
            ('{"image": "a.png"}', "line 1: a record is"),
            ('{"text": "a"}', '"image" must be a file name'),
            ('{"text": "a", "images": "a.png"}', '"images" a list'),
            ('{"text": "a", "images": ["a.png"]}', "1 images, but the text has 0 times"),
            ("", "holds no record"),
        ],
    )
    def test_records(self, tmp_path, line, match):
        path = tmp_path / "r.jsonl"
        path.write_text(line + "\n")
        with pytest.raises(DataError, match=match):
            read_records(path)

    def test_options(self, tmp_path):
        with pytest.raises(ConfigError, match="either a tokenizer or a vocab_size"):
            build(tmp_path, vocab_size=None)
        with pytest.raises(DataError, match="split 'heldout'"):
            build(tmp_path, [LINES[0]], held_out=1e-9)
        lines = [{"images": [], "text": ""}, LINES[0]]
        with pytest.raises(DataError, match="line 1: neither text nor picture"):
            build(tmp_path, lines)

    @pytest.mark.parametrize(
        ("name", "spoil", "match"),
        [
            ("train-patches.bin", lambda raw: raw[:-1], "patches.bin has"),
            ("train-grids.npy", lambda raw: raw[: len(raw) // 2], "cannot read .*grids.npy"),
            ("train-documents.npy", lambda raw: b"", "cannot read .*documents.npy"),
        ],
    )
    def test_damaged_files(self, tmp_path, name, spoil, match):
        dataset = build(tmp_path)
        path = dataset.path / name
        path.write_bytes(spoil(path.read_bytes()))
        with pytest.raises(DataError, match="corrupt: its sha256"):
            Dataset(dataset.path)
        unchecked = Dataset(dataset.path, verify=False)
        with pytest.raises(DataError, match=match):
            PictureSplit(unchecked.split("train"))

    def test_arrays_of_another_kind(self, tmp_path):
        dataset = build(tmp_path)
        np.save(dataset.path / "train-documents.npy", np.zeros((3, 2), np.int64))
        with pytest.raises(DataError, match=r"documents.npy is int64 \[3, 2\], not int64 \[4, 2\]"):
            PictureSplit(dataset.split("train"))
        np.save(dataset.path / "train-grids.npy", np.array([object()]), allow_pickle=True)
        with pytest.raises(DataError, match="cannot read"):
            PictureSplit(dataset.split("train"))

    def test_models_that_cannot_look(self, dataset):
        vision = VisionConfig(patch_size=4, text_hidden_size=128)
        check_model(dataset, preset("nano", vision=vision))
        with pytest.raises(ConfigError, match="no vision tower"):
            check_model(dataset, preset("nano"))
        other = VisionConfig(patch_size=8, text_hidden_size=128)
        with pytest.raises(ConfigError, match="patch_size is 8"):
            check_model(dataset, preset("nano", vision=other))
        merged = VisionConfig(patch_size=4, text_hidden_size=128, merge_kernel_size=(1, 1))
        with pytest.raises(ConfigError, match=r"merge_kernel_size is \[1, 1\]"):
            check_model(dataset, preset("nano", vision=merged))
