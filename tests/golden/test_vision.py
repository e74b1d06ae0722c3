"""MoonViT-V2, its projector and the image preprocessing against the authors' own code."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

from openk3.config import VisionConfig
from openk3.model.media import read_grids
from openk3.model.vision import Projector, VisionTower, rotary_angles, time_rows
from openk3.text.image import ImageProcessor


def close(ours, theirs, atol=1e-5):
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


@pytest.fixture(scope="module")
def parts(golden):
    description, t = golden("vision")
    known = {field.name for field in dataclasses.fields(VisionConfig)}
    published = {k: v for k, v in description["vision_config"].items() if k in known}
    config = VisionConfig(**published | {"merge_kernel_size": (2, 2)})
    modules = VisionTower(config), Projector(config)
    for module, name in zip(modules, ("vision_tower", "mm_projector"), strict=True):
        prefix = f"weight/{name}."
        module.load_state_dict({k[len(prefix) :]: v for k, v in t.items() if k.startswith(prefix)})
    return config, *modules, t


@pytest.mark.parametrize("case", ["images", "same", "video"])
@torch.no_grad()
def test_tower_and_projector(parts, case):
    config, tower, projector, t = parts
    pixels, grid_thws = t[f"input/{case}_pixel_values"], t[f"input/{case}_grid_thw"]
    grids = read_grids(grid_thws, config)
    embedded = tower.patch_embed(pixels, grids)
    close(embedded, t[f"output/{case}_patch_embed"])
    close(tower.encoder(embedded, grids), t[f"output/{case}_encoder"])
    merged = tower(pixels, grid_thws)
    close(merged, t[f"output/{case}_merged"])
    close(projector(merged), t[f"output/{case}_projected"])


def test_rotary_and_time_tables(parts):
    config, _, _, t = parts
    first = read_grids(t["input/images_grid_thw"], config)[:1]
    angles = rotary_angles(first, 16, torch.device("cpu"))
    close(angles.cos(), t["diag/images0_rope_cis_real"], 1e-6)
    close(angles.sin(), t["diag/images0_rope_cis_imag"], 1e-6)
    close(time_rows(4, 32, torch.device("cpu"))[:, None], t["diag/time_weight"], 1e-6)


class TestPreprocessing:
    def test_sizes_tokens_and_prompts(self, golden):
        description, _ = golden("image_preprocess")
        processor = ImageProcessor.from_hf(description)
        assert processor == ImageProcessor()
        for row in description["resize_rows"]:
            width, height = row["w"], row["h"]
            new = processor.size(width, height)
            assert new == (row["new_width"], row["new_height"])
            assert processor.num_tokens(width, height) == row["num_tokens"]
            _, down, across = processor.grid(width, height)
            assert across * 14 == new[0] + row["pad_width"]
            assert down * 14 == new[1] + row["pad_height"]

    @pytest.mark.parametrize("case", ["0_rgb", "1_rgb", "alpha_rgba", "resized_rgb"])
    def test_pixels_are_equal_bit_for_bit(self, golden, case):
        description, t = golden("image_preprocess")
        name = case.split("_")[0]
        image = Image.fromarray(t[f"input/{case}_u8"].numpy())
        processor = ImageProcessor(max_patches=12) if name == "resized" else ImageProcessor()
        ours = processor([image])
        assert np.array_equal(ours.pixel_values, t[f"output/{name}_pixel_values"].numpy())
        if name != "alpha":
            assert np.array_equal(ours.grid_thws, t[f"output/{name}_grid_thw"].numpy())
        prompts = {(r["w"], r["h"]): r["prompt"] for r in description["resize_rows"]}
        size = image.size
        assert ours.prompts == [prompts[100, 100].replace("100x100", f"{size[0]}x{size[1]}")]
