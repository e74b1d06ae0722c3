"""k3 generate --expert-cache-gb: the same text, experts from disk, the hit rate on stderr."""

import json

import pytest

from model_folders import CONFIG, write_random
from openk3.cli import main
from openk3.text import train_tokenizer


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    path = tmp_path_factory.mktemp("speaking") / "model"
    write_random(path, config=CONFIG.replace(vocab_size=640))
    train_tokenizer.train(["some words to merge, some words to keep"] * 4, 640, path=path)
    return path


def test_streaming_changes_no_word_and_says_what_it_hit(speaking, capsys):
    words = ["generate", str(speaking), "some", "--max-tokens", "8", "--temperature", "0"]
    assert main(words) == 0
    resident = capsys.readouterr()
    assert main([*words, "--expert-cache-gb", "3e-5"]) == 0
    streamed = capsys.readouterr()
    assert streamed.out == resident.out
    assert "expert cache:" not in resident.err
    assert "% hits" in streamed.err
    assert main([*words, "--expert-cache-gb", "3e-5", "--json"]) == 0
    experts = json.loads(capsys.readouterr().out)["experts"]
    assert 0 < experts["hit_rate"] <= 1
    assert experts["bytes_read"] > 0


def test_a_cache_too_small_is_refused(speaking, capsys):
    assert main(["generate", str(speaking), "x", "--expert-cache-gb", "1e-9"]) == 1
    assert "at least 2 experts" in capsys.readouterr().err


def test_training_runs_cannot_stream(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    assert main(["generate", str(tmp_path), "x", "--expert-cache-gb", "1"]) == 1
    assert "k3 convert" in capsys.readouterr().err
