"""The drawn pictures repeat, and their captions are made of few words."""

import json

import numpy as np
import pytest

from openk3.data.build_pictures import read_records
from openk3.data.drawings import DIGITS, INKS, PAPERS, SHAPES, SIZES, draw, write_drawings
from openk3.errors import DataError


def test_a_drawing_is_a_function_of_seed_and_index():
    for index in range(6):
        one, two = draw(1, index), draw(1, index)
        assert np.array_equal(np.asarray(one.image), np.asarray(two.image))
        assert one.caption == two.caption
    pixels = {np.asarray(draw(seed, 4).image).tobytes() for seed in range(4)}
    assert len(pixels) == 4


def test_captions_say_what_is_drawn():
    shapes = {"a", "on", *SIZES, *INKS, *SHAPES, *PAPERS}
    captions = [draw(0, index).caption.split() for index in range(60)]
    assert all(set(words) <= shapes and len(words) == 6 for words in captions[::2])
    assert all(words[0] == "digits" and len(words) == 3 for words in captions[1::2])
    assert {digit for words in captions[1::2] for digit in words[1:]} <= set(DIGITS)


def test_colours_are_where_the_caption_says():
    for index in range(0, 40, 2):
        image, caption = draw(0, index)
        paper, ink = PAPERS[caption.split()[-1]], INKS[caption.split()[2]]
        pixels = np.asarray(image).astype(int)
        assert np.abs(pixels[0, 0] - paper).max() < 40
        near = np.abs(pixels - ink).max(-1) < 40
        assert near.sum() > 8


def test_files(tmp_path):
    path = write_drawings(tmp_path / "out", 5, seed=3)
    records = read_records(path)
    assert [record.images[0].name for record in records] == [f"{i:06d}.png" for i in range(5)]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[2]["text"] == draw(3, 2).caption
    with pytest.raises(DataError, match="exists already"):
        write_drawings(tmp_path / "out", 5)
