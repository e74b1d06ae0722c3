"""Documents with pictures: a dataset folder with patches beside its tokens.

    PATH/SPLIT-patches.bin           uint8 [patches, 3, P, P], pictures one after another
    PATH/SPLIT-grids.npy             int64 [pictures, 3]: frames, rows and columns of patches
    PATH/SPLIT-documents.npy         int64 [documents, 2]: first picture, positions in the model
    PATH/preprocessor_config.json    patch size, mean and standard deviation

The rest is as in `openk3.data.dataset`. In the stored tokens a picture is its prompt with one media
id; a row repeats that id once per position that the picture takes.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np

from openk3._io import derive_seed
from openk3.config.model import ModelConfig
from openk3.data.dataset import Dataset, Split
from openk3.data.permute import Permutation
from openk3.data.rows import IGNORE, Patches, Row
from openk3.errors import ConfigError, DataError, InputError
from openk3.text.image import CONFIG_NAME, ImageProcessor

PATCHES, GRIDS, DOCUMENTS = "patches.bin", "grids.npy", "documents.npy"


def has_pictures(dataset: Dataset) -> bool:
    """Whether the documents of a dataset may hold pictures."""
    return (dataset.path / CONFIG_NAME).is_file()


def check_model(dataset: Dataset, config: ModelConfig) -> None:
    """Raises ConfigError when a model of `config` cannot look at a dataset's pictures."""
    where, vision = f"{dataset.path} holds pictures", config.vision
    processor = ImageProcessor.load(dataset.path)
    if vision is None:
        raise ConfigError(f"{where}, but the model has no vision tower: set [model.vision]")
    if (processor.merge_size,) * 2 != vision.merge_kernel_size:
        raise ConfigError(
            f"{where} of {processor.merge_size} x {processor.merge_size} patches a token, but "
            f"model.vision.merge_kernel_size is {list(vision.merge_kernel_size)}"
        )
    if processor.patch_size != vision.patch_size:
        raise ConfigError(
            f"{where} in patches of {processor.patch_size} pixels, but model.vision.patch_size is "
            f"{vision.patch_size}"
        )


class PictureSplit:
    """One split's documents with their pictures. Raises DataError naming a bad file."""

    def __init__(self, split: Split) -> None:
        self.split, self.dataset = split, split.dataset
        self.processor = ImageProcessor.load(self.dataset.path)
        self.media_ids = _media_ids(self.dataset)
        self.grids = self._array(GRIDS, (-1, 3))
        self._documents = self._array(DOCUMENTS, (split.num_documents, 2))
        self._first_patch = np.append(0, self.grids.prod(1).cumsum())
        self._patches = self._open_patches(int(self._first_patch[-1]))

    @property
    def lengths(self) -> np.ndarray:
        """[documents] int64: positions each document takes in the model, end-of-text included."""
        return self._documents[:, 1]

    def document(self, index: int) -> tuple[np.ndarray, Patches]:
        """Stored tokens [n] int64 with one media id per picture, and the pictures."""
        tokens = self.split.document(index)
        first, last = self._pictures(index)
        raw = self._patches[slice(*self._first_patch[[first, last]])]
        return tokens, Patches(self.processor.normalise(raw), self.grids[first:last])

    def _pictures(self, index: int) -> tuple[int, int]:
        firsts = self._documents[:, 0]
        last = firsts[index + 1] if index + 1 < len(firsts) else len(self.grids)
        return int(firsts[index]), int(last)

    def _file(self, name: str) -> Path:
        return self.dataset.path / f"{self.split.name}-{name}"

    def _array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        path = self._file(name)
        try:
            found = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"cannot read {path}: {error}") from None
        fits = all(want in (-1, have) for want, have in zip(shape, found.shape, strict=False))
        if found.dtype != np.int64 or found.ndim != len(shape) or not fits:
            raise DataError(f"{path} is {found.dtype} {list(found.shape)}, not int64 {list(shape)}")
        return found

    def _open_patches(self, num_patches: int) -> np.ndarray:
        path, side = self._file(PATCHES), self.processor.patch_size
        shape = (num_patches, 3, side, side)
        size = path.stat().st_size if path.is_file() else -1
        if size != int(np.prod(shape)):
            raise DataError(f"{path} has {max(0, size)} bytes where {list(shape)} are needed")
        return np.memmap(path, np.uint8, "r", shape=shape) if size else np.empty(shape, np.uint8)


def _media_ids(dataset: Dataset) -> tuple[int, int, int]:
    """Tokens that begin, stand for and end a picture."""
    found = dataset.source.get("media_ids")
    if not isinstance(found, list) or len(found) != 3:
        raise DataError(f"{dataset.path / 'index.json'} does not name its media_ids")
    begin, pad, end = found
    return begin, pad, end


class PictureRows:
    """A RowSource: row i is one whole document, never cut, with its pictures.

    A target is every token after the first, except those of the pictures' prompts. `seed` None
    takes the documents once, in order, and then gives empty rows (for evaluation).
    """

    def __init__(self, pictures: PictureSplit, seq_len: int, seed: int | None) -> None:
        longest = int(pictures.lengths.max(initial=0)) - 1
        if longest > seq_len:
            raise ConfigError(
                f"{pictures.dataset.path}: a document with its pictures takes {longest} positions, "
                f"more than data.sequence_tokens ({seq_len})"
            )
        self.pictures, self.seq_len = pictures, seq_len
        self.dataset = pictures.dataset
        self.num_rows = pictures.split.num_documents
        self._seed = seed
        self._order = lru_cache(maxsize=2)(
            lambda epoch: Permutation(self.num_rows, derive_seed(seed or 0, "pictures", epoch))
        )

    def row(self, index: int) -> Row:
        """Row `index`; index // num_rows is its epoch."""
        if index < 0:
            raise InputError(f"row index is {index}; it must not be negative")
        epoch, place = divmod(index, self.num_rows)
        if self._seed is not None:
            return self._row(self._order(epoch)(place))
        return self._row(index) if epoch == 0 else _EMPTY

    def _row(self, document: int) -> Row:
        tokens, patches = self.pictures.document(document)
        begin, pad, end = self.pictures.media_ids
        repeats = np.ones(len(tokens), np.int64)
        merge = self.pictures.processor.merge_size
        repeats[tokens == pad] = patches.grids[:, 1:].prod(1) // merge**2
        inside = (tokens == begin).cumsum() - (tokens == end).cumsum() + (tokens == end) > 0
        ids, ignored = tokens.repeat(repeats), inside.repeat(repeats)
        targets = np.where(ignored, IGNORE, ids)[1:]
        num_bytes = int(self.dataset.token_bytes[targets[targets != IGNORE]].sum())
        return Row(ids[:-1], targets, _NONE, num_bytes, patches)


_NONE = np.empty(0, np.int64)
_EMPTY = Row(_NONE, _NONE, _NONE, 0)
