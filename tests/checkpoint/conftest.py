"""A small model folder in the published layout, for each test its own."""

import pytest

from model_folders import Spoiler, write_random


@pytest.fixture
def folder(tmp_path):
    return write_random(tmp_path / "model")


@pytest.fixture
def dense_folder(tmp_path):
    return write_random(tmp_path / "dense", mxfp4_experts=False)


@pytest.fixture
def spoil(folder):
    return Spoiler(folder)
