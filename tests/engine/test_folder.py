"""Opening a model folder: its tokenizer and preprocessing must be the model's own."""

import argparse
import dataclasses
import inspect
import json

import pytest

from model_folders import CONFIG, write_random
from openk3.engine.folder import open_folder
from openk3.errors import ConfigError, DataError
from openk3.text.image import CONFIG_NAME, ImageProcessor
from openk3.text.train_tokenizer import train
from pictures_run import VISION

SEEING = dataclasses.replace(VISION, text_hidden_size=CONFIG.hidden_size)
TEXTS = inspect.getsource(argparse).splitlines(keepends=True)


def folder(path, vocab_size, vision=None):
    write_random(path, config=CONFIG.replace(vocab_size=vocab_size, vision=vision))
    train(TEXTS, vocab_size=600, path=path)
    return path


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path):
    path = folder(tmp_path / "model", 592)
    with pytest.raises(DataError, match=r"model: its tokenizer has 600 ids.* 592: .* another voc"):
        open_folder(path, device="cpu")


def test_a_model_without_eyes_has_no_processor(tmp_path):
    opened = open_folder(folder(tmp_path / "model", 600), device="cpu")
    assert opened.processor is None
    assert opened.name == "model"


def test_preprocessing_is_the_towers_own(tmp_path):
    path = folder(tmp_path / "model", 608, SEEING)
    processor = open_folder(path, device="cpu").processor
    assert processor is not None
    assert (processor.patch_size, processor.merge_size) == (SEEING.patch_size, 2)
    (path / CONFIG_NAME).write_text(json.dumps(ImageProcessor(patch_size=14).to_hf()))
    with pytest.raises(ConfigError, match=r"preproc.*: patch_size is 14, the model's .* says 8"):
        open_folder(path, device="cpu")
