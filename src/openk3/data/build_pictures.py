"""From JSONL records with pictures to a dataset folder: see `openk3.data.pictures`.

A record is {"image": FILE, "text": CAPTION}: the picture, then the text. Or "images": [FILES], and
the text says where they stand by `<|kimi_image_placeholder|>`. Paths are relative to the records.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from openk3._io import write_json
from openk3.data.build import HELD_OUT, TRAIN, name_hash, token_lengths
from openk3.data.dataset import Dataset
from openk3.data.pictures import DOCUMENTS, GRIDS, PATCHES
from openk3.data.writer import DatasetWriter, write_dataset
from openk3.errors import ConfigError, DataError
from openk3.text.image import CONFIG_NAME, ImageProcessor, image_prompt, open_image
from openk3.text.special_tokens import EOS, MEDIA_BEGIN, MEDIA_END, MEDIA_PAD
from openk3.text.tokenizer import Tokenizer
from openk3.text.xtml.content import IMAGE_PLACEHOLDER


class Record(NamedTuple):
    """One document."""

    where: str
    """Its file and line."""
    name: str
    """What decides its split."""
    texts: list[str]
    """The text before, between and after the pictures."""
    images: list[Path]


def read_records(path: str | Path) -> list[Record]:
    """The records of a JSONL file, checked. Raises DataError naming file and line."""
    path = Path(path)
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    records = [_record(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise DataError(f"{path} holds no record")
    return records


def _record(line: str, path: Path, number: int) -> Record:
    where = f"{path}, line {number}"
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise DataError(f'{where}: a record is {{"image": FILE, "text": CAPTION}}')
    names, text = value.get("images"), value["text"]
    if names is None:
        names, text = [value.get("image")], IMAGE_PLACEHOLDER + text
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f'{where}: "image" must be a file name, "images" a list of them')
    images = [path.parent / str(name) for name in names]
    texts = text.split(IMAGE_PLACEHOLDER)
    if len(texts) != len(images) + 1:
        raise DataError(
            f"{where}: {len(images)} images, but the text has {len(texts) - 1} times "
            f"{IMAGE_PLACEHOLDER}"
        )
    return Record(where, f"{path.name}:{number}", texts, images)


def build_pictures(
    records: Sequence[Record],
    out: str | Path,
    *,
    processor: ImageProcessor,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    held_out: float = 0.1,
    note: str = "",
) -> Dataset:
    """Write records as a dataset folder `out` and open it; see `openk3.data.build.build`.

    `held_out` is the expected share of records in split "heldout". Raises ConfigError, or
    DataError naming the record or picture that is unusable; then nothing is written.
    """
    if (tokenizer is None) == (vocab_size is None):
        raise ConfigError("give either a tokenizer or a vocab_size to train one of")
    splits = [_split(record, held_out) for record in records]
    for needed in (TRAIN, *[HELD_OUT] * (held_out > 0)):
        if needed not in splits:
            raise DataError(f"no record falls into split {needed!r}; give more or change held_out")
    if tokenizer is None:
        tokenizer = _train_tokenizer(records, splits, vocab_size or 0)
    media_ids = [tokenizer.special_id(name) for name in (MEDIA_BEGIN, MEDIA_PAD, MEDIA_END)]
    with write_dataset(
        out,
        token_bytes=token_lengths(tokenizer),
        eot_id=tokenizer.special_id(EOS),
        tokenizer=tokenizer,
        source={"note": note, "media_ids": media_ids},
    ) as writer:
        write_json(writer.folder / CONFIG_NAME, processor.to_hf())
        sinks = {name: _Sink(writer, name, processor) for name in sorted(set(splits))}
        for record, split in zip(records, splits, strict=True):
            sinks[split].add(record, tokenizer)
        for sink in sinks.values():
            sink.finish()
    return Dataset(out)


def _split(record: Record, held_out: float) -> str:
    return HELD_OUT if name_hash(record.name, "held out") < held_out else TRAIN


def _train_tokenizer(
    records: Sequence[Record], splits: Sequence[str], vocab_size: int
) -> Tokenizer:
    """Of the training texts, and of how sizes are written in the pictures' prompts."""
    from openk3.text.train_tokenizer import train

    def texts() -> Iterator[str]:
        for record, split in zip(records, splits, strict=True):
            if split == TRAIN:
                yield from record.texts
                yield "image " * len(record.images)

    return train(texts(), vocab_size)


class _Sink:
    """Streams the documents and pictures of one split."""

    def __init__(self, writer: DatasetWriter, split: str, processor: ImageProcessor) -> None:
        self._writer, self._split, self._processor = writer, split, processor
        self._path(PATCHES).touch()
        self._grids: list[tuple[int, int, int]] = []
        self._documents: list[tuple[int, int]] = []

    def _path(self, name: str) -> Path:
        return self._writer.folder / f"{self._split}-{name}"

    def add(self, record: Record, tokenizer: Tokenizer) -> None:
        first, rows = len(self._grids), 0
        segments = [(record.texts[0], False)]
        for path, text in zip(record.images, record.texts[1:], strict=True):
            image = open_image(path)
            with open(self._path(PATCHES), "ab") as patches:
                patches.write(self._processor.patches(image).tobytes())
            self._grids.append(self._processor.grid(*image.size))
            rows += self._processor.num_tokens(*image.size)
            segments += [(image_prompt(*image.size), True), (text, False)]
        ids = tokenizer.encode_segments([s for s in segments if s[0]])
        if not ids:
            raise DataError(f"{record.where}: neither text nor picture")
        self._writer.add(self._split, ids)
        self._documents.append((first, len(ids) + 1 + rows - len(record.images)))

    def finish(self) -> None:
        np.save(self._path(GRIDS), np.array(self._grids, np.int64).reshape(-1, 3))
        np.save(self._path(DOCUMENTS), np.array(self._documents, np.int64).reshape(-1, 2))
