"""A checkpoint in the published layout, written by the reference libraries: load, run, rewrite."""

import pytest
import torch
from safetensors.torch import load_file

import openk3
from conftest import GOLDEN_SHARED
from openk3.checkpoint.experts import stream_stats
from openk3.model.vision import expand_media

FOLDER = GOLDEN_SHARED / "golden" / "tiny_checkpoint"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason=f"{FOLDER} is not on this machine")


@pytest.fixture(scope="module")
def expected():
    return load_file(FOLDER.parent / "tiny_checkpoint_expected.safetensors")


@pytest.mark.parametrize("experts", ["dequant", "packed", "stream"])
@torch.no_grad()
def test_text_logits_and_greedy_tokens(expected, experts):
    model = openk3.load(FOLDER, dtype=torch.float32, experts=experts, expert_cache_gb=2e-5)
    logits = model(expected["input/ids"])
    torch.testing.assert_close(logits, expected["output/logits"], atol=5e-4, rtol=0)
    ids = model.generate(expected["input/ids"], max_new_tokens=16, temperature=0, stop_ids=[])
    assert torch.equal(ids[:, 21:], expected["output/greedy_tokens"])
    stats = stream_stats(model)
    assert (stats is not None) == (experts == "stream")
    if stats is not None:
        assert stats.evictions > 0  # the cache was far too small for all experts
        assert stats.predicted > 0


@torch.no_grad()
def test_logits_with_two_images(expected):
    model = openk3.load(FOLDER, dtype=torch.float32)
    ids, grid_thws = expected["input/mm_ids"], expected["input/mm_grid_thw"]
    images = {"pixel_values": expected["input/mm_pixel_values"], "grid_thws": grid_thws}
    logits = model(ids, **images)
    torch.testing.assert_close(logits, expected["output/mm_logits"], atol=5e-4, rtol=0)
    expanded = expand_media(ids, grid_thws, model.config)
    assert torch.equal(model(expanded, **images), logits)


@pytest.mark.parametrize("mxfp4", [True, False])
@torch.no_grad()
def test_rewritten_and_loaded_again_it_is_the_same_model(expected, tmp_path, mxfp4):
    model = openk3.load(FOLDER, experts="packed")
    openk3.save(model, tmp_path / "copy", mxfp4_experts=mxfp4)
    again = openk3.load(tmp_path / "copy", dtype=torch.float32)
    logits = again(expected["input/ids"])
    torch.testing.assert_close(logits, expected["output/logits"], atol=5e-4, rtol=0)
