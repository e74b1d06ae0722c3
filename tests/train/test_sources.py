"""A recipe's data becomes the rows that the data folder promises."""

import dataclasses

from openk3.data.mixture import Mixture
from openk3.train.sources import open_data
from tiny_run import tiny_recipe, write_tiny_data


def test_datasets_mix_by_weight_and_are_shuffled_apart(tmp_path):
    one, two = (str(write_tiny_data(tmp_path / name)) for name in ("one", "two"))
    recipe = tiny_recipe(tmp_path / "one")
    alone = open_data(recipe).source
    data = dataclasses.replace(recipe.data, train=(one, two), weights=(3.0, 1.0))
    mixed = open_data(dataclasses.replace(recipe, data=data)).source
    assert isinstance(mixed, Mixture)
    assert mixed.shares == [7500, 2500]
    first, second = ([s.row(i).targets.tolist() for i in range(8)] for s in mixed.sources)
    assert first == [alone.row(i).targets.tolist() for i in range(8)]
    assert first != second
