"""Training on pictures: what is learnt from, what is counted, and what an evaluation says."""

import dataclasses

import pytest
import torch

from openk3.data.build_pictures import build_pictures, read_records
from openk3.data.drawings import write_drawings
from openk3.data.loader import Loader
from openk3.data.rows import IGNORE
from openk3.errors import ConfigError
from openk3.model import K3
from openk3.obs.metrics import read_rows
from openk3.parallel.world import World
from openk3.text.image import ImageProcessor
from openk3.train.evaluate import exact_rows
from openk3.train.setup import training
from openk3.train.sources import open_data, with_special_ids
from openk3.train.step import packed_hidden
from pictures_run import VISION
from tiny_run import tiny_config, tiny_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    base = tmp_path_factory.mktemp("pictures")
    records = read_records(write_drawings(base / "drawings", 24))
    processor = ImageProcessor(patch_size=8)
    build_pictures(records, base / "data", processor=processor, vocab_size=300, held_out=0.3)
    changes = {"data__sequence_tokens": 56, "train__steps": 4, "run__eval_tokens": 0}
    recipe = tiny_recipe(base / "data", **changes)
    return dataclasses.replace(recipe, model=tiny_config().replace(vision=VISION))


@pytest.fixture(scope="module")
def batch_and_model(recipe):
    data = open_data(recipe)
    recipe = with_special_ids(recipe, data.datasets[0])
    return next(Loader(data.source, 4)), K3(recipe.model, seed=0)


def test_a_run_learns_sees_and_says_how_many_captions_are_right(recipe, tmp_path):
    with training(recipe, tmp_path / "run", World()) as trainer:
        before = {n: p.clone() for n, p in trainer.model.named_parameters()}
        assert trainer.fit()
    rows = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    losses = [row["loss"] for row in rows if row["kind"] == "step"]
    assert losses[-1] < losses[0]
    score = [row for row in rows if row["kind"] == "eval"][-1]
    held_out = open_data(recipe).datasets[0].split("heldout")
    assert score["exact"] == trainer.last_evaluation.exact
    assert 0 <= score["exact"] <= 1
    assert trainer.last_evaluation.num_captions == held_out.num_documents
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert {n for n in before if n.startswith(("vision_tower", "mm_projector"))} <= moved
    assert (tmp_path / "run" / "preprocessor_config.json").exists()


@torch.no_grad()
def test_rows_need_no_packing(batch_and_model):
    batch, model = batch_and_model
    assert batch.whole_rows
    model.eval()
    packed = packed_hidden(model, dataclasses.replace(batch, whole_rows=False))
    seen = batch.valid.flatten()
    torch.testing.assert_close(
        packed_hidden(model, batch)[:, seen], packed[:, seen], atol=2e-4, rtol=1e-3
    )


def test_pictures_count_for_balancing_and_padding_does_not(batch_and_model):
    batch, model = batch_and_model
    model.train()
    with torch.no_grad():
        packed_hidden(model, batch)
    assert int((batch.targets == IGNORE).sum()) > int((~batch.valid).sum()) > 0
    tokens = int(batch.valid.sum())
    counted = {int(router.load.sum()) for router in model.routers().values()}
    assert counted == {tokens * model.config.num_experts_per_token}


def test_exact_rows():
    targets = torch.tensor([[IGNORE, 3, 1], [2, IGNORE, IGNORE], [IGNORE] * 3, [4, 4, 0]])
    guesses = torch.tensor([[0, 3, 1], [1, 2, 2], [0, 0, 0], [4, 4, 0]])
    model = K3(tiny_config(), seed=None)
    model.lm_head.weight = torch.nn.Parameter(torch.eye(300, 32))
    hidden = torch.nn.functional.one_hot(guesses.view(1, -1), 32).float()
    assert exact_rows(model, hidden, targets).tolist() == [3, 2]


def test_a_model_without_eyes_is_refused(recipe):
    with pytest.raises(ConfigError, match="no vision tower"):
        open_data(dataclasses.replace(recipe, model=tiny_config()))
