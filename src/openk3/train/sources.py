"""From a recipe's [data] to rows to train on and documents to score."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from openk3._io import sha256_file
from openk3.config.recipe import Recipe
from openk3.data.dataset import Dataset
from openk3.data.loader import Batch, batches_in_order
from openk3.data.mixture import training_rows
from openk3.data.pictures import PictureRows, PictureSplit, check_model, has_pictures
from openk3.data.rows import InOrder, RowSource
from openk3.errors import ConfigError
from openk3.parallel.world import World
from openk3.text import special_tokens
from openk3.text.tokenizer import load as load_tokenizer

EVAL_BATCH_TOKENS = 2048
"""Positions of one evaluation batch."""
SPECIAL_IDS = {
    "bos_token_id": special_tokens.BOS,
    "eos_token_id": special_tokens.END_OF_MSG,
    "pad_token_id": special_tokens.PAD,
    "media_placeholder_token_id": special_tokens.MEDIA_PAD,
}
"""Model config fields and the names of their tokens; as published, a message ends a generation."""


@dataclass
class Data:
    """The opened data of a recipe."""

    datasets: list[Dataset]
    source: RowSource
    fingerprint: str
    """Of everything that decides the rows."""


def open_data(recipe: Recipe) -> Data:
    """Open and check the datasets of a recipe. Raises ConfigError and DataError."""
    settings, config = recipe.data, recipe.model
    if not settings.train:
        raise ConfigError(
            "data.train names no dataset; build one with `k3 data build` and pass its folder as "
            "--data.train FOLDER"
        )
    if settings.weights and len(settings.weights) != len(settings.train):
        raise ConfigError(
            f"data.weights has {len(settings.weights)} numbers for {len(settings.train)} datasets"
        )
    if settings.sequence_tokens > config.max_position_embeddings:
        raise ConfigError(
            f"data.sequence_tokens ({settings.sequence_tokens}) exceeds the model's limit "
            f"max_position_embeddings ({config.max_position_embeddings})"
        )
    datasets = [Dataset(path) for path in settings.train]
    for dataset in datasets:
        if dataset.vocab_size > config.vocab_size:
            raise ConfigError(
                f"{dataset.path} has a vocabulary of {dataset.vocab_size}, larger than the model's "
                f"vocab_size ({config.vocab_size}); pass --model.vocab_size {dataset.vocab_size} "
                "or build the data with a smaller --vocab-size"
            )
        if has_pictures(dataset):
            check_model(dataset, config)
    if settings.eval_split and settings.eval_split not in datasets[0].splits:
        raise ConfigError(
            f"{datasets[0].path} has no split {settings.eval_split!r} to evaluate on; build it "
            'with --held-out above 0, or pass --data.eval_split "" to train without evaluation'
        )
    splits = [dataset.split("train") for dataset in datasets]
    source = training_rows(splits, settings.sequence_tokens, settings.seed, settings.weights)
    hashes = [sha256_file(d.path / "index.json")[:16] for d in datasets]
    return Data(datasets, source, "+".join(hashes))


def with_special_ids(recipe: Recipe, dataset: Dataset) -> Recipe:
    """The recipe whose model names the special tokens of the data's tokenizer.

    So the model's config.json, and whatever stops at its end-of-message id, fits its vocabulary.
    """
    if dataset.tokenizer_path is None:
        return recipe
    ids = load_tokenizer(dataset.tokenizer_path).special_tokens
    named = {field: ids[name] for field, name in SPECIAL_IDS.items() if name in ids}
    return dataclasses.replace(recipe, model=recipe.model.replace(**named))


def held_out(recipe: Recipe, data: Data, world: World, max_tokens: int) -> Iterator[Batch]:
    """This process's held-out batches, about `max_tokens` tokens in all, or everything if 0."""
    length = recipe.data.sequence_tokens
    split = data.datasets[0].split(recipe.data.eval_split)
    if has_pictures(split.dataset):
        context, rows = 0, PictureRows(PictureSplit(split), length, None)
    else:
        context = length // 4
        rows = InOrder(split, length, context)
    num_rows = max(1, EVAL_BATCH_TOKENS // length)
    batches = batches_in_order(rows, num_rows, rank=world.rank, world_size=world.size)
    per_batch = num_rows * (length - context) * world.size
    return islice(batches, max(1, max_tokens // per_batch)) if max_tokens else batches
